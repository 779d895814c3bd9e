"""What tensor ranks send in a step, in which order, and in which parts. The numbers stay the same bits."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import runs
import torch
from helpers import run_processes, run_ranks
from tensor_cases import TOKENS, Case, batches, build
from torch import Tensor, nn

import xds
from xds.offload import activations
from xds.ops.comm import threads
from xds.ops.comm.exchange import EqualParts
from xds.ops.comm.handles import Handle
from xds.ops.comm.threads import LightThread
from xds.pipe import channel
from xds.pipe.weight_grads import WeightGrads
from xds.tensor import overlap, partition
from xds.tensor.exchange import Exchange
from xds.zero import get_full_grad

RECOMPUTED = {"activation_checkpointing": {"enabled": True}}


class Mlp(nn.Module):
    """Biases on both sides, a width that three ranks cannot share evenly, packed gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.packed = nn.Linear(10, 2 * 13)
        self.down = nn.Linear(13, 10)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.packed(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


PLAN = {"blocks.*.packed": "packed_colwise", "blocks.*.down": "rowwise"}


def inputs(step: int, _: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(step))


def train_mlps(tensor: int, stage: int) -> tuple[list[runs.Step], list[str], int, list[Tensor]]:
    """Steps; collectives and bytes of sums of the last one; the parameters."""
    section = {"tp_size": tensor, "plan": PLAN} if tensor > 1 else {}
    config = runs.config(stage, params={"eps": 1e-3}, clip=0.01, tensor_parallel=section)
    config["zero_optimization"] = {"stage": stage}
    engine = xds.initialize(Mlps(), config)
    found, before, ring = [], 0, engine._sharded.collectives.watch.ring
    for step in range(4):  # the first three compare their batches
        before = engine.bytes_sent().get("tensor sums", 0)
        ring.clear()
        found += runs.train(engine, [step], inputs)
    kinds = [mark.kind for mark in ring]
    values = [param.detach().clone() for param in engine.module.parameters()]
    sent = engine.bytes_sent().get("tensor sums", 0) - before
    engine.destroy()
    return found, kinds, sent, values


def test_a_step_of_two_blocks_has_four_sums_one_reduction_and_one_norm() -> None:
    wanted = run_ranks(train_mlps, 1, 1, 0)[0][0]
    one_sum = 2 * (3 - 1) * 4 * 10 * 4 // 3  # of activations [4, 10] in fp32
    for steps, _, sent, _ in run_ranks(train_mlps, 3, 3, 0):
        for found, one in zip(steps, wanted, strict=True):
            assert found == pytest.approx(one, rel=1e-5)
        assert sent == 2 * 2 * one_sum  # blocks, forward and backward
    ranks, sharded = run_ranks(train_mlps, 2, 2, 0), run_ranks(train_mlps, 2, 2, 1)
    for (steps, kinds, _, values), (others, _, _, same) in zip(ranks, sharded, strict=True):
        assert sorted(kinds) == ["exchange", "reduce_scatter"] + ["tensor sums"] * 4
        assert kinds[-1] == "exchange"
        assert steps == others
        assert all(one.equal(other) for one, other in zip(values, same, strict=True))


# -- sums that travel while weights get their gradients -----------------------------------------------------


def train(
    case: Case, more: dict[str, Any], steps: int = 2
) -> tuple[list[Any], dict[str, int], Any]:
    """Loss and norm of each step, the bytes of the last one by kind, the values."""
    config = case.config() | more
    model = build(case.model, layers=case.layers)
    if more.get("freezes"):  # weights of some layers, the bias of others
        del config["freezes"]
        for name, param in model.named_parameters():
            param.requires_grad_("1." not in name and "q_proj" not in name)
    engine = xds.initialize(model, config)
    found, sent = [], {}
    for step in range(steps):
        before = engine.bytes_sent()
        loss = engine.train_batch(batches(case.model, step, engine.dp_rank))
        sent = {kind: size - before.get(kind, 0) for kind, size in engine.bytes_sent().items()}
        found.append((loss.item(), engine.get_global_grad_norm()))
    values = engine.full_state_dict(rank0_only=False)
    engine.destroy()
    return found, sent, values


def test_overlapped_sums_have_the_same_bits() -> None:
    case = Case("llama", 1, 1, 1, 2, 1)
    for more, plan in ((RECOMPUTED, {}), ({"freezes": True}, {}), (RECOMPUTED, {"plan": TOKENS})):
        sections = [{"tp_size": 2, "tp_overlap_comm": on, **plan} for on in (True, False)]
        with_it, without = (
            run_ranks(train, 2, case, more | {"tensor_parallel": section}) for section in sections
        )
        for (steps, _, values), (others, _, same) in zip(with_it, without, strict=True):
            assert steps == others
            assert all(torch.equal(value, same[name]) for name, value in values.items())


def events_of_a_backward(plan: dict[str, str]) -> list[str]:
    case = Case("llama", 1, 1, 1, 2, 0)
    config = case.config() | {"gradient_accumulation_steps": 1}
    config["tensor_parallel"] |= {"tp_overlap_comm": True} | ({"plan": plan} if plan else {})
    engine = xds.initialize(build("llama"), config)
    engine.train_batch(batches("llama", 0, 0))  # the slices are proven in the first forward
    loss = engine(**next(batches("llama", 1, 0))).loss
    seen: list[str] = []
    start, weight = Exchange.start_sum, overlap.weight_grad

    class Seen(Handle):
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def wait(self) -> None:
            seen.append("wait")
            self._handle.wait()

    def spied_start(*args: Any) -> Any:
        total, handle = start(*args)
        seen.append("start")
        return total, Seen(handle)

    def spied_weight(*args: Any, **kwargs: Any) -> Tensor:
        seen.append("weight")
        return weight(*args, **kwargs)

    with (
        mock.patch.object(Exchange, "start_sum", spied_start),
        mock.patch.object(overlap, "weight_grad", spied_weight),
    ):
        engine.backward(loss)
    engine.destroy()
    return seen


@pytest.mark.parametrize("plan", ["found", "tokens"])
def test_weights_get_their_gradients_while_the_sum_travels(plan: str) -> None:
    of_mlp, of_attention = ["start", *["weight"] * 2, "wait"], ["start", *["weight"] * 3, "wait"]
    of_head = ["start", "weight", "wait"] if plan == "found" else []
    for seen in run_processes(events_of_a_backward, 2, TOKENS if plan == "tokens" else {}):
        assert seen == [*of_head, *4 * (of_mlp + of_attention)]


def backwards_of_one_graph(count: int) -> tuple[list[Tensor], int]:
    """The gradients after some backwards of one loss, and the uses that wait for a gradient then."""
    section = {"tp_size": 2, "plan": PLAN, "tp_overlap_comm": True}
    config = runs.config(0, optimizer="SGD", params={"lr": 0.1}, tensor_parallel=section)
    engine, uses = xds.initialize(Mlps(), config), []
    runs.train(engine, [0, 1, 2], inputs)
    made = overlap._Uses.__init__

    def noted(self: Any, *args: Any) -> None:
        uses.append(self)
        made(self, *args)

    with mock.patch.object(overlap._Uses, "__init__", noted):
        loss = engine(inputs(3, 0))
    for number in range(count):
        engine.backward(loss, retain_graph=number + 1 < count)
    grads = [get_full_grad(param).clone() for param in engine.module.parameters()]
    engine.destroy()
    assert uses
    return grads, sum(len(each.pairs) for each in uses)


def test_a_second_backward_adds_the_same_gradients_once_more() -> None:
    once, twice = (run_ranks(backwards_of_one_graph, 2, count) for count in (1, 2))
    for (grads, waiting), (others, still) in zip(once, twice, strict=True):
        assert waiting == still == 0
        assert all((2 * one).equal(other) for one, other in zip(grads, others, strict=True))


# -- weight gradients that are computed later ---------------------------------------------------------------


def train_deferred(schedule: str) -> tuple[list[Any], set[tuple[int, ...]], int]:
    """Losses and norms, the shapes of the gradients from W actions, and how many layers are prepared."""
    shapes: set[tuple[int, ...]] = set()
    owners: dict[Any, int] = {}
    plain = WeightGrads._add

    def spied(self: WeightGrads, param: Any, grad: Tensor, *rest: Any) -> None:
        shapes.add(tuple(grad.shape))
        owners[self] = self.num_layers
        plain(self, param, grad, *rest)

    with mock.patch.object(WeightGrads, "_add", spied):
        pipeline = {"stages": 2, "schedule": schedule}
        found, _, _ = train(Case("gpt", 2, 1, 1, 2, 0), {"pipeline": pipeline})
    return found, shapes, sum(owners.values())


@pytest.mark.slow
def test_weight_gradients_of_slices_are_deferred() -> None:
    later, at_once = (run_processes(train_deferred, 4, name) for name in ("zero_bubble", "1f1b"))
    assert [steps for steps, _, _ in later] == [steps for steps, _, _ in at_once]
    for _, shapes, num_layers in later[2:]:  # the first stage computes both gradients at once
        assert num_layers == 9  # four of each block, and the head
        # rows and columns of slices of qkv, out, up and down, of width 32
        assert shapes >= {(48, 32), (32, 16), (64, 32), (32, 64)}
    assert at_once[2][1:] == (set(), 0)


# -- parts: inputs of recomputed blocks, and what goes to the next stage ------------------------------------


def train_in_parts(section: dict[str, Any]) -> tuple[list[Any], int, list[int], int]:
    """Loss and norm of each step, bytes of gathers in the last, elements of kept parts, tensors on the host."""
    kept: list[int] = []
    moved: list[int] = []
    cut, note = partition._Part.__init__, activations._OffloadedTensor.__init__

    def noted(self: Any, shape: torch.Size, values: Tensor) -> None:
        kept.append(values.shape.numel())
        cut(self, shape, values)

    def left(self: Any, shape: torch.Size, *rest: Any) -> None:
        moved.append(shape.numel())
        note(self, shape, *rest)

    with (
        mock.patch.object(partition, "MIN_NUMEL", 1),
        mock.patch.object(activations, "MIN_BYTES", 1),
        mock.patch.object(partition._Part, "__init__", noted),
        mock.patch.object(activations._OffloadedTensor, "__init__", left),
    ):
        more = {"activation_checkpointing": {"enabled": True, **section}}
        found, sent, _ = train(Case("llama", 1, 1, 1, 2, 1), more)
    return found, sent.get(partition.KIND, 0), kept, len(moved)


def test_parts_of_inputs_change_no_number_and_are_a_share() -> None:
    parts = {"partition_activations": True}
    sections = ({}, parts, parts | {"cpu_checkpointing": True})
    by_section = [run_processes(train_in_parts, 2, section) for section in sections]
    for whole, part, on_host in zip(*by_section, strict=True):
        assert whole[1:] == (0, [], 0)
        assert whole[0] == part[0] == on_host[0]
        assert set(part[2]) == {2 * 12 * 32 // 2}  # of the input of a block: samples, tokens, width
        assert (
            part[1] == on_host[1] == 4 * sum(part[2]) // 2
        )  # each goes to the other rank, in 4 bytes
        assert (part[3], on_host[3]) == (0, len(part[2]))


def test_tensor_ranks_send_their_share_to_the_next_stage() -> None:
    case = Case("gpt", 2, 1, 1, 2, 1)
    stages = {"stages": 2, "schedule": "1f1b"}
    whole = stages | {"pipe_partitioned": False, "grad_partitioned": False}
    plain, parts = (run_ranks(train, 4, case, {"pipeline": one}) for one in (whole, stages))
    flows = ("activations", "gradients")
    for (steps, before, _), (found, after, _) in zip(plain, parts, strict=True):
        assert found == steps and channel.JOINS not in before
        halves = {kind: before.get(kind, 0) // 2 for kind in flows}
        assert {kind: after.get(kind, 0) for kind in flows} == halves
        # a rank receives as much as it sends in this schedule
        assert after[channel.JOINS] == sum(halves.values())
        assert all(after[kind] == size for kind, size in before.items() if kind not in flows)


def test_small_leaves_are_sent_whole() -> None:
    class Group:
        rank, world_size = 2, 3

    parts = EqualParts(Group(), "x")  # type: ignore[arg-type]
    assert [parts.numel_of(numel) for numel in (9, 8, 7)] == [3, 2, 1]
    assert parts.are_used((3, 1)) and not parts.are_used(()) and not parts.are_used((2,))
    assert parts.own(torch.arange(8.0)).tolist() == [6.0, 7.0]


# -- the thread that sends small messages -------------------------------------------------------------------


def test_the_thread_runs_jobs_and_raises_their_errors() -> None:
    thread, names = LightThread(), []

    def nested() -> None:
        names.append(threading.current_thread().name)
        thread.run(lambda: names.append(threading.current_thread().name))  # taken: it runs here

    def fails() -> None:
        raise RuntimeError("no peer")

    thread.run(nested)
    with pytest.raises(RuntimeError, match="no peer"):
        thread.run(fails)
    thread.run(nested)
    assert names == ["xds-messages"] * 4


def test_a_forked_process_gets_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, seen = LightThread(), []
    thread.run(lambda: seen.append(threading.get_ident()))
    monkeypatch.setattr(os, "getpid", lambda: -2)  # as in a copy of this process without the thread
    thread.run(lambda: seen.append(threading.get_ident()))
    assert len({*seen, threading.get_ident()}) == 3


def test_the_thread_ends_without_a_process_group_and_the_next_job_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    thread, seen = LightThread(), []
    for _ in range(2):
        thread.run(lambda: seen.append(threading.current_thread()))
        seen[-1].join(60)
        assert not seen[-1].is_alive()
    assert seen[0] is not seen[1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        thread.run(lambda: seen.append(threading.current_thread()))
    assert seen[2] is seen[3] and seen[3].is_alive()
    seen[3].stop()
    assert not seen[3].is_alive()
