"""Tests of the section pipeline: what it accepts, the data ranks that it leaves, and each refusal."""

import re

import pytest

import xds
from xds.engine.config.config import parse_config
from xds.pipe.config import NUMBERS

SMALL = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}


def read(pipeline, world_size=None, **others):
    return parse_config({**SMALL, "pipeline": pipeline, **others}, world_size=world_size)


def complaints(pipeline, world_size=None, **others):
    with pytest.raises(xds.ConfigError) as caught:
        read(pipeline, world_size, **others)
    return list(caught.value.complaints)


# -- what the section accepts -----------------------------------------------------------------------------


def test_values_are_read_in_any_case():
    section = {
        "stages": "auto",
        "schedule": "GPipe",
        "partition": "Uniform",
        "micro_batches": "auto",
    }
    found = read(section).pipeline
    assert (found.stages, found.schedule) == (1, "gpipe")
    assert (found.partition, found.micro_batches) == ("uniform", None)
    assert read({"partition": "Type:Block"}).pipeline.partition == "type:Block"
    assert read({"partition": [0, 0, 3, 3]}).pipeline.partition == (0, 0, 3, 3)


@pytest.mark.parametrize(
    ("section", "chunks", "micro_batches"),
    [
        ({"schedule": "gpipe"}, 1, 1),
        ({}, 1, 4),
        ({"schedule": "interleaved_1f1b"}, 2, 4),
        ({"schedule": "interleaved_1f1b", "chunks": 3}, 3, 4),
        ({"schedule": "zero_bubble"}, 1, 4),
        ({"schedule": "zbv"}, 2, 4),
        ({"schedule": "dualpipev"}, 2, 8),
        ({"schedule": "auto"}, 0, 1),
    ],
)
def test_numbers_of_a_schedule(section, chunks, micro_batches):
    found = read({"stages": 4, **section}).pipeline
    assert (found.num_chunks, found.least_micro_batches) == (chunks, micro_batches)


def test_the_numbers_are_those_of_the_schedules():
    schedules = pytest.importorskip("xds.pipe.schedules.build").SCHEDULES
    assert {
        name: (each.num_chunks[0], each.num_chunks[-1] == 0, each.micro_batches_a_rank)
        for name, each in schedules.items()
    } == {name: (each.chunks, each.any_more, each.micro_batches) for name, each in NUMBERS.items()}


@pytest.mark.parametrize(
    ("section", "micro_batches", "share"),
    [
        ({"stages": 4}, 8, 3 / 11),
        ({"stages": 4, "schedule": "gpipe"}, 8, 3 / 11),
        ({"stages": 4, "schedule": "interleaved_1f1b", "chunks": 3}, 8, 3 / 27),
        ({"stages": 4, "schedule": "zero_bubble"}, 8, 3 / 27),
        ({"stages": 4, "schedule": "zbv"}, 8, None),
        ({"stages": 1}, 8, 0),
    ],
)
def test_the_share_of_a_step_in_which_a_rank_waits(section, micro_batches, share):
    assert read(section).pipeline.bubble(micro_batches) == share


# -- ranks ----------------------------------------------------------------------------------------------


def test_elasticity_counts_data_ranks():
    elastic = {
        "enabled": True,
        "max_train_batch_size": 96,
        "micro_batch_sizes": [2, 4],
        "model_parallel_size": 2,
        "num_gpus_per_node": 2,
    }

    def resolved(world_size):
        given = {"elasticity": elastic, "pipeline": {"stages": 2}}
        return parse_config(given, world_size=world_size)

    config = resolved(8)
    assert (config.data_parallel_ranks, config.train_batch_size) == (
        4,
        resolved(2).train_batch_size,
    )
    sizes = (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert sizes[0] * sizes[1] * 4 == config.train_batch_size
    with pytest.raises(
        xds.ConfigError, match="world size = 14: .* 14 ranks cannot share; start .*12"
    ):
        resolved(14)
    for stages, parallel in ((1, 2), (4, 2), (2, 1)):
        changed = {**elastic, "model_parallel_size": parallel}
        with pytest.raises(
            xds.ConfigError, match=re.escape(f"must equal pipeline.stages ({stages})")
        ):
            parse_config({"elasticity": changed, "pipeline": {"stages": stages}})


def test_a_model_may_give_the_stages():
    config = read({"schedule": "zbv"})
    assert any("pipeline.schedule" in note for note in config.notes)
    cut = config.with_stages(2)
    assert cut.pipeline.stages == 2 and cut.resolve(4).data_parallel_ranks == 2
    assert not any("pipeline.schedule" in note for note in cut.notes)
    assert config.with_stages(1) is config and cut.with_stages(2) is cut
    with pytest.raises(xds.ConfigError, match=r"pipeline.stages = 2: .* stages of the model \(4\)"):
        cut.with_stages(4)
    with pytest.raises(xds.ConfigError, match="managed_gradient_accumulation"):
        read({}, managed_gradient_accumulation=False).with_stages(2)


# -- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"partition": "type:"}, "a regular expression must follow type:"),
        ({"partition": [1, 2, 3]}, "bounds must begin with 0"),
        ({"partition": [0, 2, 2, 3]}, "each must be larger than the one before it"),
        ({"partition": [0, 0, 0, 3]}, "the first two may be equal"),
        ({"stages": 2, "chunks": 2}, '"1f1b" needs 1 on each rank; remove chunks, or set'),
        (
            {"stages": 2, "schedule": "interleaved_1f1b", "chunks": 1},
            "needs at least 2 on each rank; remove chunks, or set pipeline.schedule to one with 1: gpipe, 1f1b",
        ),
        ({"stages": 2, "schedule": "zbv", "chunks": 3}, "one with 3: interleaved_1f1b"),
        (
            {"stages": 2, "schedule": "zbv", "partition": [0, 1, 2]},
            "2 parts, and pipeline.stages (2) x pipeline.chunks (2) = 4 are needed; give 5 bounds",
        ),
        (
            {"stages": 2, "first_stage_modules": ["a", "b"], "last_stage_modules": ["b"]},
            '"b" is in first_stage_modules too',
        ),
    ],
)
def test_one_wrong_value_gives_one_sentence(section, says):
    (said,) = complaints(section)
    assert said.startswith("pipeline.") and says in said


@pytest.mark.parametrize(
    ("section", "steps", "least"),
    [
        ({"stages": 4}, 3, 4),
        ({"stages": 2, "schedule": "zero_bubble"}, 1, 2),
        ({"stages": 2, "schedule": "dualpipev"}, 3, 4),
        ({"stages": 8, "schedule": "gpipe"}, 1, None),
        ({"stages": 8, "schedule": "auto"}, 1, None),
    ],
)
def test_too_few_micro_batches(section, steps, least):
    size = {"gradient_accumulation_steps": steps}
    if least is None:
        assert read(section, 8, **size).gradient_accumulation_steps == steps
        return
    (said,) = complaints(section, 8, **size)
    assert said.startswith(f"gradient_accumulation_steps = {steps}: the schedule ")
    assert f"raise gradient_accumulation_steps to {least}, or set pipeline.schedule to" in said
