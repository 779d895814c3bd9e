"""Elastic batch sizes: the rules, the config section, what the launcher asks, `xds elastic`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xds
from xds.engine.config.config import parse_config
from xds.engine.elastic.rules import Limits, candidates, highly_composite, plan
from xds.engine.elastic.world_sizes import compute_elastic_config, fits, valid_world_sizes
from xds.launcher import elasticity as command

SECTION = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4, 6]}


def config(**changes):
    return {"elasticity": {**SECTION, **changes}}


def complaints(source, **kwargs):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **kwargs)
    return caught.value.complaints


@st.composite
def limit_cases(draw):
    micros = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True))
    per_node, parallel = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 8), (8, 1)]))
    least = draw(st.integers(1, 60))
    return Limits(
        max_batch_size=draw(st.integers(max(micros) * per_node, 5000)),
        micro_batch_sizes=tuple(micros),
        min_gpus=least,
        max_gpus=draw(st.integers(least, 2000)),
        prefers_larger=draw(st.booleans()),
        ranks_per_node=per_node,
        model_parallel_size=parallel,
    )


def planned(limits):
    try:
        return plan(limits)
    except ValueError:
        return None


# -- the rules ------------------------------------------------------------------------------------------


def test_factors_have_more_divisors_than_every_smaller_number():
    counts = [0] * 5041
    for divisor in range(1, len(counts)):
        for multiple in range(divisor, len(counts), divisor):
            counts[multiple] += 1
    records = [n for n in range(1, len(counts)) if counts[n] > max(counts[:n])]
    assert list(highly_composite())[: len(records)] == records
    assert len(highly_composite()) == 38  # DeepSpeed's table has as many, up to the same
    assert highly_composite()[-1] == 720_720


@given(limit_cases())
def test_the_planned_batch_is_shared_by_all_numbers_of_ranks_that_can_and_by_most(limits):
    found = planned(limits)
    if found is None:
        return
    assert 0 < found.batch_size <= limits.max_batch_size
    for replicas, world_size in zip(found.replicas, found.world_sizes, strict=True):
        micro, steps = found.split(replicas)
        assert micro in limits.micro_batch_sizes
        assert micro * steps * replicas == found.batch_size
        assert limits.min_gpus <= world_size <= limits.max_gpus
        assert world_size % limits.ranks_per_node == 0
        assert found.fits(world_size)
    for world_size in range(limits.min_gpus, min(limits.max_gpus, 300) + 1):
        nodes, left = divmod(world_size, limits.ranks_per_node)
        each, rest = divmod(found.batch_size, max(1, nodes * limits.replicas_per_node))
        can = not left and not rest and any(each % m == 0 for m in limits.micro_batch_sizes)
        assert found.fits(world_size) == can
    for batch in candidates(
        limits.micro_batch_sizes, limits.max_batch_size // limits.replicas_per_node
    ):
        total = batch * limits.replicas_per_node
        count = sum(
            any(
                total % (micro * nodes * limits.replicas_per_node) == 0
                for micro in limits.micro_batch_sizes
            )
            for nodes in range(1, min(limits.max_gpus, total) // limits.ranks_per_node + 1)
            if nodes * limits.ranks_per_node >= limits.min_gpus
        )
        assert count <= len(found.replicas)
        if count == len(found.replicas):
            assert total <= found.batch_size if limits.prefers_larger else total >= found.batch_size


# (max batch, micro-batches, min ranks, max ranks, prefer larger, ranks a node): what DeepSpeed 0.15.4 answers,
# (batch, how many valid numbers of ranks, the first, the last), and (a number of ranks, its micro-batch)
MEASURED = [
    ((10000, (8, 12, 16, 17), 32, 1500, True, 1), (9792, 23, 32, 1224), (144, 17)),
    ((2000, (2, 4, 6), 1, 10000, True, 1), (1680, 32, 1, 840), (30, 4)),
    ((2000, (2, 4, 6), 1, 10000, True, 8), (1920, 16, 8, 960), (96, 4)),
    ((2000, (2, 4, 6), 1, 10000, False, 1), (1680, 32, 1, 840), (30, 4)),
    ((500, (3, 5), 1, 64, False, 1), (360, 18, 1, 60), (12, 5)),
    ((4096, (1, 2, 4, 8), 8, 512, True, 8), (2880, 19, 8, 480), (96, 2)),
    ((200000, (7, 20), 4, 300, True, 4), (141120, 32, 4, 288), (84, 20)),
    ((64, (1,), 1, 64, False, 1), (60, 12, 1, 60), (10, 1)),
]


@pytest.mark.parametrize(("limits", "answer", "split"), MEASURED)
def test_the_answers_are_deepspeeds(limits, answer, split):
    found = plan(Limits(*limits))
    sizes = found.replicas
    assert (found.batch_size, len(sizes), sizes[0], sizes[-1]) == answer
    assert (split[0], found.split(split[0])[0]) == split


def test_bounds_that_end_inside_a_node_leave_the_node_out():
    found = plan(Limits(1024, (4,), min_gpus=12, max_gpus=30, ranks_per_node=8))
    assert set(found.world_sizes) <= {16, 24}
    assert found.nodes == tuple(size // 8 for size in found.world_sizes)


# -- the config -----------------------------------------------------------------------------------------


def test_the_batch_stays_the_same_at_every_valid_number_of_ranks():
    read = parse_config(config())
    sizes = valid_world_sizes(config(), 100)
    assert sizes[:5] == [1, 2, 3, 4, 5] or sizes[0] == 1
    for size in sizes:
        found = read.resolve(size)
        assert found.train_batch_size == read.resolve(1).train_batch_size <= 100
        product = found.train_micro_batch_size_per_gpu * found.gradient_accumulation_steps * size
        assert product == found.train_batch_size
        assert found.train_micro_batch_size_per_gpu in (2, 4, 6)


def test_a_number_of_ranks_that_does_not_fit_is_refused_with_the_ones_near_it():
    (said,) = complaints(config(), world_size=7)
    near = valid_world_sizes(config(), 100)
    below, above = max(n for n in near if n < 7), min(n for n in near if n > 7)
    assert said.startswith("world size = 7: ")
    assert f"{below}, {above}" in said and "xds elastic" in said
    (said,) = complaints(config(), world_size=5000)
    assert f"..., {', '.join(map(str, near[-3:]))} ranks" in said


@pytest.mark.parametrize(
    "key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
)
def test_another_batch_size_beside_it_is_an_error_unless_it_is_to_be_ignored(key):
    (said,) = complaints({key: 8, **config()})
    assert said.startswith(f"{key} = 8: ") and "ignore_non_elastic_batch_info" in said
    read = parse_config({key: 7, **config(ignore_non_elastic_batch_info=True)}, world_size=4)
    assert [path for path, _ in read.without_effect] == [key]
    assert getattr(read, key) == getattr(parse_config(config(), world_size=4), key)
    assert parse_config({key: "auto", **config()}, world_size=4).world_size == 4


@pytest.mark.parametrize(
    ("changes", "starts", "says"),
    [
        ({"max_train_batch_size": None}, "elasticity.max_train_batch_size", "is missing"),
        ({"micro_batch_sizes": None}, "elasticity.micro_batch_sizes", "is missing"),
        ({"micro_batch_sizes": []}, "elasticity.micro_batch_sizes = []", "a list"),
        ({"micro_batch_sizes": [2, 200]}, "elasticity.micro_batch_sizes", "remove 200"),
        ({"version": 0.3}, "elasticity.version = 0.3", "0.1 or 0.2"),
        ({"min_gpus": 3, "max_gpus": 2}, "elasticity.max_gpus = 2", "at least elasticity.min_gpus"),
        ({"min_gpus": 97}, "elasticity.min_gpus = 97", "lower min_gpus"),
        (
            {"model_parallel_size": 2, "num_gpus_per_node": 2},
            "elasticity.model_parallel_size = 2",
            "must equal pipeline.stages (1)",
        ),
        ({"min_gpu": 1}, "elasticity.min_gpu = 1", 'did you mean "min_gpus"?'),
    ],
)
def test_a_section_that_cannot_work_names_key_and_remedy(changes, starts, says):
    section = {**SECTION, **changes}
    given = {"elasticity": {key: value for key, value in section.items() if value is not None}}
    found = complaints(given, world_size=2)
    assert any(said.startswith(starts) and says in said for said in found), found
    assert len(found) == len(set(found))


def test_version_01_has_no_model_parallelism_and_no_nodes():
    source = config(version=0.1, num_gpus_per_node=8)
    assert 1 in valid_world_sizes(source, 8)
    with pytest.raises(xds.ConfigError, match="version 0.1 has no model parallelism"):
        fits(config(version=0.1, model_parallel_size=2))


def test_min_time_is_for_a_scheduler_and_named():
    read = parse_config(config(min_time=20))
    assert [path for path, _ in read.without_effect] == ["elasticity.min_time"]


# -- what the launcher and schedulers ask ---------------------------------------------------------------


def test_fits_and_valid_world_sizes_agree_and_need_only_their_section(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config(), "optimizer": {"type": "auto"}}))
    can = fits(str(path))
    assert [n for n in range(1, 60) if can(n)] == valid_world_sizes(str(path), 59)
    assert not can(0) and not can(-1)


def test_planning_with_model_parallelism_counts_all_ranks():
    source = config(model_parallel_size=2, num_gpus_per_node=4, max_train_batch_size=1000)
    sizes = valid_world_sizes(source, 40)
    assert sizes and all(size % 4 == 0 for size in sizes)
    batch, replicas = compute_elastic_config(source)
    assert [count * 2 for count in replicas][: len(sizes)] == sizes
    assert compute_elastic_config(source, "0.15.4", replicas[0])[2] in (2, 4, 6)


@pytest.mark.parametrize("source", [{}, {"elasticity": {"enabled": False}}])
def test_a_config_that_is_not_elastic_is_refused(source):
    with pytest.raises(xds.ConfigError, match="elasticity"):
        fits(source)


def test_the_command_prints_the_sizes_and_one_split(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(num_gpus_per_node=2)))
    assert command.main([str(path), "--world-size", "4"]) == 0
    said = capsys.readouterr().out
    read = parse_config(str(path), world_size=4)
    assert f"train_batch_size = {read.train_batch_size} samples" in said
    assert "numbers of nodes (nodes of 2 ranks): 1, 2" in said
    assert f"train_micro_batch_size_per_gpu = {read.train_micro_batch_size_per_gpu}" in said

    assert command.main([str(path), "--world-size", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gradient_accumulation_steps"] == read.gradient_accumulation_steps
    assert told["valid_world_sizes"] == [2 * nodes for nodes in told["valid_nodes"]]


def test_the_command_refuses_a_number_that_does_not_fit(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config()))
    assert command.main([str(path), "--world-size", "7"]) == 2
    assert "--world-size = 7" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none.json")]) == 2
    assert command.main(["{}"]) == 2
    with pytest.raises(SystemExit):
        command.main([str(path), "--world-size", "0"])
