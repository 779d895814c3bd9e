"""ZeRO++: sums against a reference, bytes inside and across hosts, second shards, writes, resume, bad input."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from manifest_damages import manifest_text
from placed_ranks import placed
from runs import PRECISIONS, config
from torch import Tensor, nn
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from zeropp_reference import Adam, Sums

import xds
from xds.compression.unit import GradientUnit
from xds.compression.zeropp.scheme import ZeroppChoice, ZeroppScheme
from xds.launcher import checkpoint as command
from xds.ops.comm.collectives import Collectives
from xds.ops.comm.fake import fake_collectives
from xds.ops.comm.mesh_groups import Levels
from xds.zero import GatheredParameters, get_full_param, set_full_param


def run_threads(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As `run_ranks`, on torch's threaded process group: it has no send and recv, so `Native` is used.

    Its reduce_scatter is wrong where the output is a view of the input, as at stages 0 and 1.
    """
    results: list[Any] = [None] * world_size
    failures: list[str] = []
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = function(*args)
        except SystemExit:
            pass  # another rank failed
        except BaseException as error:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(120)
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise AssertionError(failures[0])
    return results


LR, DECAY, STEPS = 1e-2, 0.1, 4
WEIGHTS, GRADS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
SAVED = 4
SECOND = {"zero_hpz_partition_size": 2}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
LOCO = {"zeropp_loco_param": {"err_beta": 0.6, "reset_T": 7}}
RESET_AFTER_LOAD = {"zeropp_loco_param": {"err_beta": 0.6, "reset_T": SAVED + 1}}


@contextmanager
def hosts_of(length: int) -> Iterator[None]:
    """Each `length` ranks say that they are on a host of their own."""
    with placed([rank // length for rank in range(dist.get_world_size())]):
        yield


def config_of(stage: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """All of the model is gathered again in backward."""
    zero = {"max_reuse_distance": 0, **zero}
    return config(stage, samples=1, params={"weight_decay": DECAY}, zero=zero, **more)


class Vector(nn.Module):
    """One parameter [n], whose gradient is the input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(1)))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def grad_of(numel: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** (rank % 3)


def train_vector(
    stage: int, zero: dict[str, Any], length: int, numel: int, more: dict[str, Any]
) -> Any:
    """The parameter after each step, and the bytes of the last one."""
    with hosts_of(length):
        engine = xds.initialize(Vector(numel), config_of(stage, zero, **more))
    found = []
    dtype = engine.module.weight.dtype
    for step in range(STEPS):
        before = engine.bytes_sent()
        engine.backward(engine(grad_of(numel, step, dist.get_rank()).to(dtype)))
        engine.step()
        found.append(get_full_param(engine.module.weight))
    after = engine.bytes_sent()
    engine.destroy()
    return found, {kind: after[kind] - before.get(kind, 0) for kind in after}


@pytest.mark.parametrize(
    ("num_ranks", "length", "beta", "numel", "precision"),
    [
        (4, 2, 0.6, 4 * 1024, "fp32"),  # two hops
        (4, 3, 0.6, 4 * 1024, "bf16"),  # unlike hosts: one hop
    ],
)
def test_quantised_gradients_are_those_of_the_reference_at_every_stage(
    num_ranks: int, length: int, beta: float | None, numel: int, precision: str
) -> None:
    loco = {} if beta is None else {"zeropp_loco_param": {"err_beta": beta, "reset_T": 1000}}
    sums = Sums(num_ranks, length if num_ranks % length == 0 else 1, beta)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    adam = Adam(Vector(numel).weight.detach().to(dtype), LR, DECAY)
    values = []
    for step in range(STEPS):
        grads = [grad_of(numel, step, rank).to(dtype) for rank in range(num_ranks)]
        adam.step(sums.of(grads) / num_ranks)
        values.append(adam.value)
    runs = {}
    for stage in (1, 2, 3):
        case = (stage, {**GRADS, **loco}, length, numel, PRECISIONS[precision])
        runs[stage] = run_ranks(train_vector, num_ranks, *case)
    for stage, ranks in runs.items():
        for found, _ in ranks:
            for one, other in zip(found, runs[1][0][0], strict=True):
                assert one.equal(other), stage
            for one, want in zip(found, values, strict=True):
                assert (one - want).abs().max() <= 1e-5 * want.abs().max(), stage


def test_kept_errors_follow_the_loss_scale() -> None:
    """A run whose scale doubles every second step has the bits of one whose scale stays."""
    rises = {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2}
    stays = {"enabled": True, "loss_scale": 4.0}
    zero = {**GRADS, "zeropp_loco_param": {"err_beta": 0.6, "reset_T": 1000}}
    one, other = (
        run_ranks(train_vector, 2, 2, zero, 1, 2048, {"fp16": fp16}) for fp16 in (rises, stays)
    )
    for (found, _), (want, _) in zip(one, other, strict=True):
        assert all(a.equal(b) for a, b in zip(found, want, strict=True))


def test_messages_over_a_backends_own_collectives_have_the_same_bits() -> None:
    """As on NCCL: torch's threaded process group has no send and recv."""
    for stage, zero, length in ((2, {**GRADS, **LOCO}, 2), (3, {**GRADS, **WEIGHTS}, 4)):
        args = (stage, zero, length, 4 * 1024, {})
        threads = run_threads(train_vector, 4, *args)
        for (found, sent), (want, bytes_) in zip(
            threads, run_ranks(train_vector, 4, *args), strict=True
        ):
            for kind in sent.keys() - {"access"}:  # whose messages differ
                assert sent[kind] == bytes_[kind], kind
            assert all(one.equal(other) for one, other in zip(found, want, strict=True))


class Blocks(nn.Module):
    """Blocks of odd sizes, one of them frozen, with an embedding that is used twice."""

    def __init__(self, *, freezes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(50, 37)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(37), nn.Linear(37, 71), nn.GELU(), nn.Linear(71, 37))
            for _ in range(3)
        )
        if freezes:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(
            (x @ self.embed.weight.T).flatten(0, 1), targets.flatten()
        )


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 50, (2, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Run:
    """What differs between runs. start: the first step."""

    zero: dict[str, Any]
    stage: int = 3
    freezes: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    num_micro: int = 1


def train(run: Run, steps: int = 6, start: int = 0, load: str = "", save: str = "") -> Any:
    """Losses and norms of `steps`, the parameters at the end, and the bytes of the last step by kind.

    load, save: where to load from, and where to save after step SAVED.
    """
    num_micro = run.num_micro
    more = {"gradient_accumulation_steps": num_micro, "gradient_clipping": 1.0, **run.more}
    with hosts_of(2):
        engine = xds.initialize(Blocks(freezes=run.freezes), config_of(run.stage, run.zero, **more))
    if load:
        engine.load_checkpoint(load)
    seen, before = [], {}
    for step in range(start, start + steps):
        before = engine.bytes_sent()
        for micro in range(num_micro):
            loss = engine(*tokens_of(1000 * micro + step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
        seen.append((loss.item(), engine.get_global_grad_norm()))
        if save and step + 1 == SAVED:
            engine.save_checkpoint(save)
    params = {name: get_full_param(p) for name, p in engine.module.named_parameters()}
    after = engine.bytes_sent()
    engine.destroy()
    return seen, params, {kind: after[kind] - before.get(kind, 0) for kind in after}


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(value.equal(other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize(
    ("zero", "precision"),
    [({}, "fp32"), ({"offload_optimizer": {"device": "cpu"}, **WEIGHTS}, "bf16")],
)
def test_second_shards_change_no_bit_and_send_nothing_across_hosts_in_backward(
    zero: dict[str, Any], precision: str
) -> None:
    """Also where an update arrives from the host's memory."""
    run = Run(zero, 3, True, PRECISIONS[precision])
    plain = run_ranks(train, 4, run, 4)
    second = run_ranks(train, 4, replace(run, zero={**zero, **SECOND}), 4)
    for one, other in zip(plain, second, strict=True):
        assert_same(one, other)
        inside = other[2].pop("parameters inside a host")
        assert inside > 0
        kind = "int8 parameters" if WEIGHTS.items() <= zero.items() else "all_gather"
        assert other[2][kind] < one[2][kind]


def gathered(zero: dict[str, Any]) -> Any:
    """What each rank computes with, and the exact values."""
    with hosts_of(2):
        engine = xds.initialize(Blocks(), config_of(3, zero))
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, _: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            seen[f"{id(module)}.{name}"] = param.detach().clone()

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
    engine(*tokens_of(0, 0))
    exact = [
        get_full_param(p) for m in engine.module.modules() for p in m.parameters(recurse=False)
    ]
    names = [
        f"{id(m)}.{n}"
        for m in engine.module.modules()
        for n, _ in m.named_parameters(recurse=False)
    ]
    found = [seen[name] for name in names]
    engine.destroy()
    return found, exact, [p.detach().clone() for p in engine.module.parameters()]


def test_all_ranks_compute_with_the_same_rounded_weights_and_keep_exact_ones() -> None:
    ranks = run_ranks(gathered, 4, WEIGHTS)
    plain = [p.detach() for p in Blocks().parameters()]
    largest = max(p.abs().max() for p in plain)  # a block may have several parameters
    for found, exact, after in ranks:
        for value, first, kept, given, left in zip(
            found, ranks[0][0], exact, plain, after, strict=True
        ):
            assert value.equal(first) and kept.equal(given) and left.equal(given)
            assert (value - given).abs().max() <= largest / 127 / 2 + 1e-6
        assert any(not value.equal(given) for value, given in zip(found, plain, strict=True))


def write_in_forward(zero: dict[str, Any], how: str) -> Any:
    """A script's write counts at once, and only what was written changes in the exact values."""
    with hosts_of(2):
        engine = xds.initialize(Blocks(), config_of(3, zero))
    weight = engine.module.blocks[1][1].weight
    before = get_full_param(weight)
    seen = []

    def hook(module: nn.Module, _: Any) -> None:
        seen.append(weight.detach().clone())
        if how == "forward" and len(seen) == 1:
            weight.data[3] = 0.25

    handle = engine.module.blocks[1][1].register_forward_pre_hook(hook)
    engine(*tokens_of(0, 0))
    if how == "set":
        value = before.clone()
        value[3] = 0.25
        set_full_param(weight, value)
    elif how == "gathered":
        with GatheredParameters(weight, modifier_rank=1):
            if dist.get_rank() == 1:
                weight.data[3] = 0.25
    elif how == "load":
        state = {name: torch.full(p.shape, 0.25) for name, p in Blocks().named_parameters()}
        engine.load_state_dict(state)
    engine(*tokens_of(0, 0))
    after = get_full_param(weight)
    handle.remove()
    engine.destroy()
    return before, after, seen[-1]


def test_what_a_script_writes_is_computed_with_and_nothing_else_changes() -> None:
    for how in ("forward", "set", "gathered", "load"):
        for before, after, seen in run_ranks(write_in_forward, 4, {**WEIGHTS, **SECOND}, how):
            if how == "load":
                assert (after == 0.25).all() and (seen == 0.25).all()
                continue
            changed = (before != after).any(1)
            assert changed.nonzero().flatten().tolist() == [3], how
            assert (after[3] == 0.25).all(), how
            assert (seen[3] - 0.25).abs().max() <= 1 / 127, how


@pytest.mark.parametrize(
    ("zero", "stage", "more", "num_micro"),
    [
        ({**WEIGHTS, **GRADS, **SECOND, **LOCO}, 3, PRECISIONS["bf16"], 2),
        ({**GRADS, **RESET_AFTER_LOAD}, 1, FP16, 1),
    ],
)
@pytest.mark.quick("zero1-1-more1-1")
def test_a_resumed_run_has_the_same_bits(
    zero: dict[str, Any], stage: int, more: dict[str, Any], num_micro: int, tmp_path: Any
) -> None:
    folder = str(tmp_path)
    run = Run(zero, stage, False, more, num_micro)
    whole = run_ranks(train, 4, run, 6, 0, "", folder)
    resumed = run_ranks(train, 4, run, 2, 4, folder)
    for one, two in zip(whole, resumed, strict=True):
        assert one[0][4:] == two[0]
        assert all(value.equal(two[1][name]) for name, value in one[1].items())
    plain = replace(run, zero={key: value for key, value in zero.items() if "hpz" not in key})
    for seen, *_ in run_ranks(train, 3, plain, 2, 4, folder):
        assert all(loss < 40 and norm < 40 for loss, norm in seen)


def load_without(folder: str) -> str:
    engine = xds.initialize(Blocks(), config_of(2, {**GRADS, **LOCO}))
    with pytest.raises(xds.UsageError) as caught:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(caught.value)


def test_an_error_that_is_gone_is_refused_by_verify_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(train, 2, Run({**GRADS, **LOCO}, 2), SAVED, 0, "", str(tmp_path))
    path = next(tmp_path.glob("*/manifest.json"))
    raw = json.loads(path.read_text())
    for record in raw["files"]:
        record["ranges"] = [
            one for one in record["ranges"] if (one["key"], one["flat"]) != ("error/1", 0)
        ]
    path.write_bytes(manifest_text(raw))
    assert command.main(["verify", str(tmp_path)]) == 1
    assert "error/1" in capsys.readouterr().err
    for said in run_ranks(load_without, 2, str(tmp_path)):
        assert "contradicts itself" in said and "error/1" in said


def errors(kind: str) -> Any:
    """The error of each step; in step 4 a gradient of rank 1 is infinite."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 6}
    more = {"fp16": fp16} if kind == "skip" else {}
    numel = 2048
    engine = xds.initialize(Vector(numel), config_of(2, {**GRADS, **LOCO}, **more))
    (master,) = engine._parts.updater.masters
    found = []
    for step in range(16):
        grad = grad_of(numel, step, 0).to(engine.module.weight.dtype)
        if kind == "skip" and step == 4 and dist.get_rank() == 1:
            grad[7] = float("inf")
        engine.backward(engine(grad))
        engine.step()
        pending = master.grads.reducer.pending_error
        found.append(float((pending.error * pending.unit).abs().max()))
    skipped = engine.skipped_steps
    engine.destroy()
    return found, skipped


def test_errors_are_reset_on_time_and_after_a_skipped_step() -> None:
    found, _ = run_ranks(errors, 2, "plain")[0]
    assert [at for at, value in enumerate(found) if value == 0] == [6, 13]
    found, skipped = run_ranks(errors, 2, "skip")[0]
    assert skipped == 1 and [at for at, value in enumerate(found) if value == 0] == [4, 10]
    assert max(found) < 1


def test_bytes_are_those_of_the_formula() -> None:
    numel, num_ranks = 8 * 4096, 4
    n = numel // num_ranks
    eight, four = n + 4 * n // 256, n // 2 + 4 * n // 256
    for length in (2, 4):
        hosts_, peers = num_ranks // length, num_ranks - 1
        run = (train_vector, num_ranks, 3, {**WEIGHTS, **GRADS}, length, numel, {})
        for _, sent in run_ranks(*run):
            gathers = 2 if sent["int8 parameters"] > peers * eight else 1
            if length == 2:
                assert sent["int4 gradients"] == (length - 1) * hosts_ * four
                assert sent["int4 sums of a host"] == (hosts_ - 1) * four
                once = (hosts_ - 1) * eight + (length - 1) * hosts_ * eight
            else:
                assert sent["int4 gradients"] == peers * four
                once = peers * eight
            assert sent["int8 parameters"] == gathers * once


BAD = [
    (2, WEIGHTS, "zero_quantized_weights = true: only stage 3 gathers"),
    (1, {"zero_quantized_nontrainable_weights": True}, "only stage 3 gathers"),
    (2, SECOND, "zero_hpz_partition_size = 2: only stage 3"),
    (0, GRADS, "zero_quantized_gradients = true: stage 0 sends sums"),
    (3, {"zeropp_loco_param": {}}, "set zero_quantized_gradients to true"),
    (3, {**WEIGHTS, "divergent_graphs": True}, "set divergent_graphs to false"),
    (3, {**GRADS, "zeropp_loco_param": {"err_beta": 2}}, "zeropp_loco_param.err_beta"),
    (3, {**GRADS, "zeropp_loco_param": {"reset_T": 0}}, "zeropp_loco_param.reset_T"),
]


def test_bad_settings_are_refused() -> None:
    for stage, zero, words in BAD:
        with pytest.raises(xds.ConfigError, match=words):
            xds.Config.load(config_of(stage, zero))


def refused(zero: dict[str, Any], length: int, dtype: torch.dtype) -> str:
    with hosts_of(length), pytest.raises(xds.UsageError) as caught:
        xds.initialize(Vector(4096).to(dtype), config_of(3, zero))
    return str(caught.value)


def test_second_shards_that_do_not_fit_are_refused() -> None:
    (text, *_) = run_ranks(refused, 4, {"zero_hpz_partition_size": 3}, 4, torch.float32)
    assert "zero_hpz_partition_size = 3: 4 data ranks are not a whole number" in text
    (text, *_) = run_ranks(refused, 4, {"zero_hpz_partition_size": 4}, 2, torch.float32)
    assert "data ranks 0 to 3 are on 2 hosts" in text
    (text, *_) = run_ranks(refused, 2, GRADS, 2, torch.float64)
    assert "torch.float64" in text and "zero_quantized_gradients" in text


def ratios(zero: dict[str, Any]) -> Any:
    """What the report says of a step, on 2 hosts of 2 ranks."""
    more = {"comms_logger": {"enabled": True}, "bf16": {"enabled": True}}
    with hosts_of(2):
        engine = xds.initialize(Vector(8 * 4096), config_of(3, zero, **more))
        engine.backward(engine(grad_of(8 * 4096, 0, dist.get_rank()).bfloat16()))
        engine.step()
        found = dict(engine._parts.report._traffic.events())
    engine.destroy()
    return found


def test_the_report_compares_with_exact_messages() -> None:
    n = 8 * 4096 // 4
    (found, *_) = run_ranks(ratios, 4, WEIGHTS)
    assert found["compression_ratio"] == pytest.approx(2 / (1 + 4 / 256))
    assert "not_sent_norm" not in found
    (found, *_) = run_ranks(ratios, 4, {**GRADS, **LOCO})
    assert found["compression_ratio"] == pytest.approx(2 / (1 / 2 + 4 / 256))
    assert found["not_sent_norm"] > 0
    assert found["sent_bytes_int4 gradients"] == 2 * (n // 2 + 4 * n // 256)
    # the gather is exact, and goes to both ranks there: threads share no memory
    across = 2 * 2 * n + (n // 2 + 4 * n // 256)
    assert across <= found["sent_bytes_to_other_hosts"] <= across + 100


def after_nan(stage: int) -> Any:
    """A model with gaps in its flat buffer: the loss of a step after one whose loss is inf on one rank."""
    torch.manual_seed(0)
    engine = xds.initialize(nn.Linear(3, 2), config_of(stage, GRADS | LOCO))
    refused = 0
    for step in range(4):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (engine(x) - x[:, :2]).square().mean()
        engine.backward(loss * float("inf") if (step, dist.get_rank()) == (1, 1) else loss)
        try:
            engine.step()
        except xds.XdsError:
            refused += 1
    engine.destroy()
    return refused, loss.item()


def test_a_nan_in_one_step_does_not_stay_in_the_gaps_of_a_buffer() -> None:
    for stage in (1, 2):
        for refused, loss in run_ranks(after_nan, 2, stage):
            assert refused == 1 and loss == loss, stage


@dataclass
class Split:
    """Opens blocks of a group of 4 ranks, and notes which."""

    own: Collectives
    groups: tuple[tuple[int, ...], ...]
    opened: list[int] = field(default_factory=list)

    def __call__(self, length: int) -> Levels:
        self.opened.append(length)
        return Levels(self.own, self.own, self.own)


@pytest.mark.parametrize("hosts", [[0] * 6 + [1] * 2, [0, 1, 1, 2, 3, 3, 4, 4]])
def test_pipeline_stages_on_unlike_hosts_open_the_same_groups(hosts: list[int]) -> None:
    opened = []
    for first in (0, 4):
        own = fake_collectives(0, 4, ("data",))
        own.backend.ranks = tuple(range(first, first + 4))
        split = Split(own, ((0, 1, 2, 3), (4, 5, 6, 7)))
        choice = ZeroppChoice(True, True, True, 1, None)
        ZeroppScheme(choice, GradientUnit(), hosts, own, split=split)
        opened.append(split.opened)
    assert opened[0] == opened[1] == [2]
