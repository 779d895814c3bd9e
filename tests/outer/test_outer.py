"""Groups that train alone and meet: the numbers of plain data parallelism, of a reference, bytes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from models import build, micro_batch
from torch import Tensor, nn

import xds
from xds.engine.config.config import Config, parse_config
from xds.engine.planning.models import FunctionModel
from xds.engine.planning.plan import make_plan
from xds.ops.comm.opening import open_collectives
from xds.outer.config import OuterOptimizer
from xds.outer.mean import bytes_of_mean, mean_of, padded_numel
from xds.outer.schedule import MeetingSchedule, fragment_of

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
RECOVERY = {"recovery": {"enabled": True}}
MEAN = {"steps": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.0}}}
Found = tuple[list[float], dict[str, Tensor], dict[str, int], int]


def config_of(outer: dict[str, Any] | None, stage: int, optimizer: Any) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
    }
    return config if outer is None else config | {"outer": outer}


def train(outer: dict[str, Any] | None, stage: int, steps: int, optimizer: Any = SGD) -> Found:
    engine = xds.initialize(build("tied"), config_of(outer, stage, optimizer))
    losses = []
    for step in range(steps):
        loss = engine(micro_batch(step, engine.dp_rank, 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.full_state_dict(rank0_only=False)
    sent = engine.bytes_sent()
    numel = sum(master.raw.numel() for master in engine._parts.updater.masters)
    engine.destroy()
    return losses, state, sent, numel


@pytest.mark.parametrize(
    ("stage", "groups", "optimizer"),
    [(0, 2, SGD), (1, 4, SGD), (2, 2, SGD), (3, 2, SGD), (3, 4, SGD), (2, 1, ADAM)],
    ids=["0", "1, four", "2", "3", "3, four", "Adam, one"],
)
@pytest.mark.quick("1, four", "3")
def test_a_meeting_in_every_step_is_plain_data_parallelism(
    stage: int, groups: int, optimizer: Any
) -> None:
    """With Adam only one group is: each group has second moments of its own gradients."""
    plain = run_ranks(train, 4, None, 0, 4, optimizer)
    found = run_ranks(train, 4, MEAN | {"groups": groups}, stage, 4, optimizer)
    for rank in range(4):
        assert found[rank][0] == pytest.approx(plain[rank][0], rel=1e-5)
    for name, value in plain[0][1].items():
        torch.testing.assert_close(found[3][1][name], value, rtol=1e-5, atol=1e-6)


UNEQUAL: list[dict[str, Any]] = [
    {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
    {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    },
]


def train_unequal(more: dict[str, Any], model: str = "tied") -> dict[str, Tensor]:
    group, rank = divmod(dist.get_rank(), 2)
    config = {"optimizer": SGD, "outer": MEAN | {"groups": 2}} | UNEQUAL[group]
    engine = xds.initialize(build(model), config | (more if group else {}))
    for step in range(3):
        for part in range(engine.gradient_accumulation_steps()):
            size = engine.train_micro_batch_size_per_gpu()
            engine.backward(engine(micro_batch(9 * step + part, 2 * group + rank, size)))
            engine.step()
    state = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return state


def test_groups_have_other_batches_and_stages() -> None:
    model = build("tied")
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(4):
            parts, size = (1, 2) if rank < 2 else (2, 3)
            for part in range(parts):
                (model(micro_batch(9 * step + part, rank, size)) * size / 16).backward()
        optimizer.step()
    found = run_ranks(train_unequal, 4, {})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[3][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "model", "text"),
    [
        (
            {"gradient_clipping": 1.0},
            "tied",
            "gradient_clipping = 0.0 on ranks 0, 1 and 1.0 on ranks 2, 3;",
        ),
        (
            {"zero_optimization": {"stage": 1, "unit_min_numel": 1}},
            "tied",
            "equal ranks of groups 0 and 1 have other elements of the model",
        ),
        ({}, "lora", "parameters that are not trained, stage 3 in all groups or in none"),
    ],
)
def test_what_groups_must_have_alike(more: dict[str, Any], model: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        run_ranks(train_unequal, 4, more, model)


def test_a_model_has_a_unit_for_each_fragment() -> None:
    with pytest.raises(AssertionError, match="a fragment has at least one unit, and the model has"):
        run_ranks(train, 2, {"groups": 2, "steps": 9, "fragments": 9}, 1, 1)


def partly_frozen(folder: str, place: str) -> dict[str, Tensor]:
    """Each rank builds other values; half of them are frozen."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    for block in model:
        block[0].requires_grad_(False)
    config = config_of({"groups": 2, "steps": 2}, 3, ADAM)
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    config["zero_optimization"]["offload_param"] = {
        "device": place,
        "nvme_path": folder,
        "max_in_cpu": 0,
    }
    engine = xds.initialize(model, config)
    for step in range(2):
        engine.backward(engine(torch.full((2, 8), float(step))).sum())
        engine.step()
    state = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return state


def test_a_group_is_never_in_two_sites(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def groups(number: int | None) -> None:
        outer = None if number is None else {"groups": number, "private_network": True}
        xds.initialize(build("plain"), config_of(outer, 1, ADAM)).destroy()

    monkeypatch.setenv("XDS_SITES", "2")
    run_ranks(groups, 4, 4)
    with pytest.raises(
        AssertionError, match="the hostfile has 2 sites, and a group would have ranks"
    ):
        run_ranks(groups, 1, 1)
    with pytest.raises(AssertionError, match="groups send plain TCP, which others on the way can"):
        run_ranks(train, 2, {"groups": 2}, 1, 1)
    run_ranks(groups, 2, None)
    assert caplog.text.count("add outer with groups = 2") == 1


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
@pytest.mark.quick("nvme")
def test_all_groups_have_the_frozen_parameters_of_the_first(place: str, tmp_path: Path) -> None:
    found = run_ranks(partly_frozen, 4, str(tmp_path), place)
    for name, value in found[0].items():
        assert torch.equal(found[2][name], value), name


def units_of(outer: dict[str, Any]) -> dict[str, int]:
    """The fragment of each parameter."""
    engine = xds.initialize(build("plain"), config_of(None, 2, ADAM))
    units = [
        [slot.name for flat in unit.params for slot in flat.layout.slots]
        for unit in engine._parts.sharded.units
    ]
    engine.destroy()
    return {
        name: fragment_of(number, outer.get("fragments", 1))
        for number, names in enumerate(units)
        for name in names
    }


def reference(outer: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """Streaming DiLoCo in plain torch, two workers: the parameters of the first one."""
    workers = [build("plain") for _ in range(2)]
    inner = [torch.optim.AdamW(w.parameters(), lr=1e-2, weight_decay=0.0) for w in workers]
    names = [name for name, _ in workers[0].named_parameters()]
    theirs = [dict(w.named_parameters()) for w in workers]
    held = {name: theirs[0][name].detach().clone().requires_grad_() for name in names}
    section = outer["optimizer"]["params"] | {"nesterov": outer["optimizer"]["type"] == "Nesterov"}
    optimizers = {name: torch.optim.SGD([held[name]], **section) for name in names}
    fragment = units_of(outer)
    schedule = MeetingSchedule(outer["steps"], outer.get("fragments", 1), outer.get("delay", 0))
    for step in range(1, steps + 1):
        for rank, worker in enumerate(workers):
            inner[rank].zero_grad()
            worker(micro_batch(step - 1, rank, 2)).backward()
            inner[rank].step()
        due = schedule.due(step) if outer.get("delay") else []
        for turn in range(2):
            with torch.no_grad():
                for name in (n for n in names if fragment[n] in due):
                    for own in theirs:
                        own[name].copy_(torch.lerp(held[name], own[name], outer.get("mix", 0.0)))
            if turn:
                break
            for name in (n for n in names if fragment[n] in schedule.starts(step)):
                held[name].grad = (
                    held[name].detach() - (theirs[0][name] + theirs[1][name]).detach() / 2
                )
                optimizers[name].step()
            due = schedule.due(step) if not outer.get("delay") else []
    return {name: theirs[0][name].detach() for name in names}


def streams(outer: dict[str, Any], steps: int, stage: int = 2) -> dict[str, Tensor]:
    engine = xds.initialize(build("plain"), config_of(outer, stage, ADAM))
    for step in range(steps):
        engine.backward(engine(micro_batch(step, engine.dp_rank, 2)))
        engine.step()
    state = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return state


NESTEROV = {"optimizer": {"type": "Nesterov", "params": {"lr": 0.7, "momentum": 0.9}}}


@pytest.mark.parametrize(
    "outer",
    [
        {"groups": 2, "steps": 3} | NESTEROV,
        {"groups": 2, "steps": 4, "fragments": 2, "delay": 1, "mix": 0.5} | NESTEROV,
        {"groups": 2, "steps": 4, "fragments": 2, "delay": 3} | NESTEROV,
        MEAN | {"groups": 2},
    ],
)
def test_meetings_follow_the_formulas_of_streaming_diloco(outer: dict[str, Any]) -> None:
    expected = reference(outer, 9)
    found = run_ranks(streams, 2, outer, 9)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
def test_groups_agree_and_send_what_was_computed(bits: int) -> None:
    outer = {"groups": 2, "steps": 2, "bits": bits}
    found = run_ranks(train, 4, outer, 1, 4)
    for name, value in found[0][1].items():
        assert torch.equal(value, found[3][1][name])
    numel = found[0][3]  # of the shards of a rank
    assert found[0][2]["outer"] == 2 * bytes_of_mean(padded_numel(numel, 2), 2, bits)
    assert found[0][2]["outer"] <= 2 * 1.05 * numel * bits / 8  # 3 % are magnitudes of blocks


def means(bits: int, times: int) -> tuple[Tensor, Tensor]:
    """The mean of the means of equal values, and the exact one."""
    groups = open_collectives(dist.group.WORLD, torch.device("cpu"))
    numel, generator = padded_numel(700, 3), torch.Generator().manual_seed(5)
    every = torch.randn(3, numel, generator=generator)
    error, total = torch.zeros(numel), torch.zeros(numel)
    for _ in range(times):
        values = every[groups.rank].clone()
        mean_of(groups, bits).of(values, error, (groups.rank + 1) / 6)
        total += values
    return total / times, (every * torch.tensor([[1.0], [2.0], [3.0]])).sum(0) / 6


@pytest.mark.parametrize(("bits", "most", "left"), [(8, 0.02, 0.2), (4, 0.2, 0.2), (2, 0.6, 0.5)])
def test_what_a_message_loses_comes_with_the_next_ones(bits: int, most: float, left: float) -> None:
    (once, exact), *_ = run_ranks(means, 3, bits, 1)
    assert (once - exact).norm() / exact.norm() < most
    found = run_ranks(means, 3, bits, 20)
    assert all(torch.equal(found[0][0], each) for each, _ in found)
    assert (found[0][0] - exact).norm() < left * (once - exact).norm()


def plain_model() -> Any:
    return build("plain")


def held_and_sent(outer: dict[str, Any], stage: int) -> tuple[int, int]:
    engine = xds.initialize(build("plain"), config_of(outer, stage, ADAM))
    for step in range(outer["steps"]):
        engine.backward(engine(micro_batch(step, engine.dp_rank, 2)))
        engine.step()
    found = engine.memory_plan()["outer"], engine.bytes_sent()["outer"]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_has_the_bytes_of_states_and_meetings(stage: int) -> None:
    outer = {"groups": 2, "steps": 2, "fragments": 2, "bits": 4}
    found = run_ranks(held_and_sent, 4, outer, stage)
    config = parse_config(config_of(outer, stage, ADAM))
    rank = make_plan(FunctionModel(f"{__name__}:plain_model"), config, 4, 8).ranks[0]
    assert found[0] == (rank.states["outer"], 2 * rank.sent["outer"].between)


def test_fragments_meet_in_turn() -> None:
    schedule = MeetingSchedule(steps=10, fragments=3, delay=4)
    starts = {step: schedule.starts(step) for step in range(1, 21) if schedule.starts(step)}
    assert starts == {3: [1], 6: [2], 10: [0], 13: [1], 16: [2], 20: [0]}
    assert schedule.due(7) == [1]
    assert schedule.due(4) == []
    assert schedule.under_way(12) == [0]
    assert schedule.under_way(14) == [1]
    assert schedule.under_way(13) == [0, 1]


def wrong(outer: dict[str, Any], more: dict[str, Any], world_size: int = 4) -> str:
    with pytest.raises(xds.ConfigError) as caught:
        Config.load(config_of(outer, 1, ADAM) | more, world_size=world_size)
    return str(caught.value)


def test_sizes_count_all_groups() -> None:
    config = Config.load(config_of({"groups": 2}, 1, ADAM), world_size=4)
    assert config.train_batch_size == 8
    assert OuterOptimizer().params.lr == 0.7


@pytest.mark.parametrize(
    ("outer", "more", "text"),
    [
        ({"groups": 3}, {}, "outer.groups = 3: must divide the number of ranks (4)"),
        ({"steps": 2, "delay": 2}, {}, "outer.delay = 2: must be below outer.steps"),
        ({"steps": 2, "fragments": 3}, {}, "outer.fragments = 3: must be at most outer.steps"),
        ({"bits": 16}, {}, "outer.bits = 16: must be"),
        ({}, {"checkpoint": {"async_save": True}}, "does not work with the section outer"),
        ({}, {"elasticity": {"enabled": True}}, "does not work with the section outer"),
        ({"quorum": 1}, {}, "outer.quorum = 1: needs recovery.enabled and `xds --recover`"),
        ({"quorum": 3}, RECOVERY, "outer.quorum = 3: must be at most outer.groups (2)"),
        (
            {"steps": 9, "fragments": 2, "delay": 4},
            RECOVERY,
            "outer.delay = 4: must be below outer.steps / outer.fragments (4)",
        ),
        ({"groups": 3}, RECOVERY, "outer.groups = 3: must divide the number of ranks (4)"),
    ],
)
def test_what_does_not_work_is_refused(
    outer: dict[str, Any], more: dict[str, Any], text: str
) -> None:
    assert text in wrong(outer, more)


def resumes(outer: dict[str, Any], folder: str, steps: tuple[int, int], saves: bool) -> Any:
    """Train to `steps[0]`, save or load there, train on to `steps[1]`: the losses after it, and the weights."""
    engine = xds.initialize(build("plain"), config_of(outer, 2, ADAM))
    if not saves:
        engine.load_checkpoint(folder)
    weights = [fragment.weight for fragment in engine._parts.outer._fragments]
    first = {
        name: value.clone() for name, value in engine.full_state_dict(rank0_only=False).items()
    }
    losses = []
    while engine.global_steps < steps[1]:
        loss = engine(micro_batch(engine.global_steps, engine.dp_rank, 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if saves and engine.global_steps == steps[0]:
            engine.save_checkpoint(folder)
            losses.clear()
    state = engine.full_state_dict(rank0_only=False)
    engine._parts.outer._settle()  # a meeting may run
    outers = torch.cat([fragment.outer for fragment in engine._parts.outer._fragments])
    engine.destroy()
    return losses, state, first, outers, weights


@pytest.mark.parametrize(
    "outer",
    [{"steps": 4, "fragments": 2, "delay": 2, "mix": 0.5}, {"steps": 3, "bits": 4}],
)
@pytest.mark.quick("outer0")
def test_a_resumed_run_has_the_same_bits(outer: dict[str, Any], tmp_path: Any) -> None:
    outer = {"groups": 2} | outer
    before = run_ranks(resumes, 4, outer, str(tmp_path), (5, 9), True)
    after = run_ranks(resumes, 4, outer, str(tmp_path), (5, 9), False)
    for rank in range(4):
        assert after[rank][0] == before[rank][0]
        for name, value in before[rank][1].items():
            assert torch.equal(after[rank][1][name], value)
        assert torch.equal(after[rank][3], before[rank][3])


def test_a_run_goes_on_with_other_groups_and_ranks(tmp_path: Any) -> None:
    run_ranks(resumes, 4, {"groups": 2, "steps": 4}, str(tmp_path), (5, 5), True)
    three = run_ranks(resumes, 3, {"groups": 3, "steps": 4}, str(tmp_path), (5, 5), False)
    assert torch.equal(three[0][3][: three[2][3].numel()], three[2][3])
    flat = torch.cat([value.flatten() for value in three[2][2].values()])
    held = three[2][3].sort().values  # the new group begins with the outer parameters
    assert torch.isin(flat, held).all()
    own = torch.cat([value.flatten() for value in three[1][2].values()])
    assert not torch.isin(own, held).all()
    # samples since the meeting after step 4
    assert [each[4] for each in three] == [[4.0], [4.0], [0.0]]
