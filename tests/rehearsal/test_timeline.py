"""Messages that the engine starts: the same on all ranks, early, and waited for late. See timeline.py."""

from __future__ import annotations

from typing import Any

import pytest
import timeline
import torch
import torch.distributed as dist
from device_ranks import ranks
from orders import examined
from test_parallel import COUNT, OVERLAPPED, TENSOR, config_of
from torch import Tensor, nn

WIDTHS = (16, 24, 40, 56, 72)  # every block has gradients of its own size


# -- the rules themselves -----------------------------------------------------------------------------------


def test_ranks_with_other_messages_are_named() -> None:
    same = {(0, 1): [("all_gather", 4), ("send 1", 3)]}
    other = {(0, 1): [("all_gather", 4), ("receive 0", 3)]}
    assert timeline.other_orders([same, other]) == []
    other = {(0, 1): [("all_gather", 5), ("receive 0", 2)]}
    first, second = timeline.other_orders([same, other])
    assert "rank 1 and rank 0: message 0 is [('all_gather', 5)] and [('all_gather', 4)]" in first
    assert "rank 0 sends to 1: message 0 is [3] and [2]" in second


GATHERS = [
    "mark begin forward a",
    "start 1 all_gather 7",
    "op 0 aten::mm",
    "mark end forward a",
    "take 1",
    "wait 0",
    "mark begin forward b",
    "op 0 aten::mm",
    "mark end forward b",
]


def test_gathers_that_begin_late_or_are_waited_for_early_are_found() -> None:
    units = [("a", 3), ("b", 7)]
    assert timeline.late_gathers(GATHERS, units, "forward") == []
    late = [*GATHERS[:1], GATHERS[2], GATHERS[1], *GATHERS[3:]]
    assert timeline.late_gathers(late, units, "forward") == [
        "forward: b is not gathered before a computes"
    ]
    early = [*GATHERS[:2], "take 1", *GATHERS[2:]]
    assert timeline.late_gathers(early, units, "forward") == [
        "forward: b is waited for while a computes"
    ]


def test_reductions_that_begin_late_or_are_waited_for_early_are_found() -> None:
    units = [("b", 7), ("a", 3)]
    good = ["start 1 reduce_scatter 7", "mark begin backward a", "op 0 x", "mark end backward a"]
    assert timeline.late_reductions([*good, "take 1"], units) == []
    late = timeline.late_reductions([*good[1:], good[0]], units)
    assert late == ["gradients of b are not reduced before backward of a"]
    early = timeline.late_reductions([*good[:2], "take 1", *good[2:]], units)
    assert early == ["gradients of b are waited for in backward of a"]
    assert timeline.not_beside(good, "reduce_scatter", 7, ["y"]) == ["reduce_scatter at line 0"]
    assert timeline.not_beside(good, "reduce_scatter", 7, ["x"]) == []


# -- the engine ---------------------------------------------------------------------------------------------


class Mark(torch.autograd.Function):
    """Writes to the log where a block begins and ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, word: str) -> Tensor:
        ctx.name, ctx.word = name, word
        torch.ops.host_cuda.note(f"mark {word} forward {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        word = "begin" if ctx.word == "end" else "end"
        torch.ops.host_cuda.note(f"mark {word} backward {ctx.name}")
        return grad, None, None


class Block(nn.Module):
    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = Mark.apply(x, self.name, "begin")
        y = x + self.down(nn.functional.gelu(self.up(x)))
        return Mark.apply(y, self.name, "end")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(str(at), width) for at, width in enumerate(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def started() -> dict[tuple[int, ...], list[tuple[str, int]]]:
    """For the ranks of each group what this rank has started there, group by group in order of creation."""
    found: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for group in dist.distributed_c10d._world.pg_map:
        members = tuple(dist.get_process_group_ranks(group))
        found.setdefault(members, []).extend(group.started)
    return found


def log_of_a_step(config: dict[str, Any]) -> tuple[list[str], list[int], dict[Any, Any]]:
    """The log of the last step, the elements of each block's buffer, and what was started."""
    import xds

    ops = torch.ops.host_cuda
    engine = xds.initialize(Model(), config)
    dtype = next(engine.module.parameters()).dtype
    for step in range(3):
        ops.take_log()
        ops.settings(step == 2, False)
        for _ in range(config["gradient_accumulation_steps"]):
            loss = engine(torch.ones(4, 32, device=engine.device, dtype=dtype)).square().mean()
            engine.backward(loss)
            engine.step()
    ops.settings(False, False)
    units = {id(unit.modules[0]): unit for unit in engine._parts.sharded.units}
    numels = [
        sum(flat.layout.numel for flat in units[id(block)].params) for block in engine.module.blocks
    ]
    engine.destroy()
    return ops.take_log(), numels, started()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (2, "fp16")])
def test_units_are_gathered_and_reduced_beside_the_computation(stage: int, precision: str) -> None:
    config = config_of(stage, precision, gradient_accumulation_steps=2)
    config["zero_optimization"]["max_reuse_distance"] = 0  # gathered again for backward
    found = ranks(2).run(log_of_a_step, config)
    assert timeline.other_orders([groups for *_, groups in found]) == []
    for log, numels, _ in found:
        names = [str(at) for at in range(len(numels))]
        units = list(zip(names, numels, strict=True))
        assert timeline.late_reductions(log, units[::-1]) == []
        if stage == 3:
            shards = [(name, numel // 2) for name, numel in units]
            assert timeline.late_gathers(log, shards, "forward") == []
            assert timeline.late_gathers(log, shards[::-1], "backward") == []


def log_of_a_backward(config: dict[str, Any]) -> tuple[list[str], int]:
    """Of a model in slices, and the elements of an activation."""
    from tensor_cases import LENGTH, SAMPLES, batches, build

    import xds

    ops = torch.ops.host_cuda
    engine = xds.initialize(build("llama"), config)
    for step in range(2):
        batch = next(batches("llama", step, 0))
        loss = engine(**{name: x.to(engine.device) for name, x in batch.items()}).loss
        ops.take_log()
        ops.settings(True, False)
        engine.backward(loss)
        ops.settings(False, False)
        engine.step()
    engine.destroy()
    return ops.take_log(), SAMPLES * LENGTH * 32


@pytest.mark.slow
def test_sums_of_slices_travel_beside_the_gradients_of_weights() -> None:
    for section, overlaps in ((OVERLAPPED, True), (TENSOR, False)):
        config = config_of(3, "bf16", tensor_parallel=section, gradient_accumulation_steps=1)
        for log, numel in ranks(2).run(log_of_a_backward, config):
            every = timeline.messages_of(log)
            sums = [each for each in every if (each.name, each.numel) == ("all_reduce", numel)]
            late = timeline.not_beside(log, "all_reduce", numel, ["aten::mm"])
            assert len(sums) == 9  # two in each of four blocks, and that of the head
            assert len(late) == (0 if overlaps else 9)


def messages_of_stages(config: dict[str, Any]) -> tuple[list[str], dict[Any, Any]]:
    """The log of the last step, and what was started."""
    from pipeline_runs import Model as Staged
    from pipeline_runs import batches

    import xds

    ops = torch.ops.host_cuda
    engine = xds.initialize(Staged(4, tied=True), config)
    for step in range(3):
        engine.eval_batch(iter(batches(step, engine.dp_rank, COUNT)))
        ops.take_log()
        ops.settings(step == 2, False)
        engine.train_batch(iter(batches(step, engine.dp_rank, COUNT)))
    ops.settings(False, False)
    engine.destroy()
    return ops.take_log(), started()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "schedule"), [(3, "zbv"), (1, "1f1b")])
def test_stages_start_the_same_messages_in_one_order_and_receive_while_they_compute(
    stage: int, schedule: str
) -> None:
    config = config_of(stage, "bf16", pipeline={"stages": 2, "schedule": schedule})
    found = ranks(2).run(messages_of_stages, config)
    assert timeline.other_orders([groups for _, groups in found]) == []
    for rank, (log, _) in enumerate(found if schedule == "1f1b" else []):
        every = timeline.messages_of(log)
        received, sent = ([m for m in every if m.name == name] for name in ("receive", "send"))
        assert len(received) == len(sent) > 0
        # the last stage needs the first activation before it can compute anything
        assert all(timeline.beside(log, m) for m in received[2 * rank :])
        last = max(m.take for m in received)
        # a send is waited for when a message has come since, or at the end of the step
        for message in sent:
            came = [m.take for m in received if m.take > message.start]
            assert message.take > min([*came, last])


@pytest.mark.slow
def test_random_products_start_their_messages_in_one_order() -> None:
    """`benchmarks/fuzz/orders.py` has more of them."""
    found = [examined(seed) for seed in (0, 10, 17)]  # two offload groups of several sizes
    assert {outcome for outcome, _ in found} <= {"ordered", "refused", "skipped"}, found
