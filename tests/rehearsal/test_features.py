"""Features beside the plain step on a CUDA device that is host memory: their numbers, and waits of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device_ranks import ranks
from helpers import run_new_ranks, run_processes, run_ranks
from test_rehearsal import FIRST, build, config_of, inputs_of, near, run_steps, waits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow  # by default test_rehearsal.py runs


def engine_of(stage: int, precision: str, accumulation: int = 1, **more: Any) -> Any:
    """An engine over the model of test_rehearsal. more: keys of the config."""
    import xds

    return xds.initialize(build(), config_of(stage, precision, accumulation) | more)


def micro_batch(engine: Any, inputs: Any) -> Any:
    loss = engine(inputs).float().square().mean()
    engine.backward(loss)
    return loss.detach()


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        losses.append(micro_batch(engine, inputs_of(engine, number)))
        engine.step()
    return [loss.item() for loss in losses]


def counted(call: Callable[..., Any], *args: Any) -> int:
    """How often the host waits in `call`."""
    before = sum(waits().values())
    call(*args)
    return sum(waits().values()) - before


# -- states on the host -------------------------------------------------------------------------------------


def away_and_back(stage: int, include: list[str] | None, pins: bool) -> Any:
    """Losses with and without the move, devices of the states while they are away, bytes of the device."""
    import xds
    from xds.zero.model.state_memory import StateMemory

    def devices() -> list[set[str]]:
        tensors = StateMemory(engine._parts.updater).state_tensors()
        params = engine._parts.sharded.memory.param_tensors()
        return [
            {
                "cpu" if engine._states.is_on_host(one) else one.device.type
                for one in some
                if one.numel()
                and (engine._states.is_on_host(one) or one.untyped_storage().nbytes())
            }
            for some in (tensors, params)
        ]

    engine = engine_of(stage, "bf16")
    undisturbed = train(engine, 0, 5)
    engine.destroy()
    engine = engine_of(stage, "bf16")
    losses = train(engine, 0, 2)
    weight, here = engine.module[0].weight, devices()
    before, _ = torch.ops.host_cuda.memory()
    engine.offload_states(include=include, pin_memory=pins)
    freed = before - torch.ops.host_cuda.memory()[0]
    other = torch.full((freed // 4,), 7.0, device=engine.device)  # takes the memory
    away = devices()
    zeros = torch.zeros(weight.shape, device=engine.device)
    for access in (
        xds.zero.get_full_param,
        lambda param: xds.zero.set_full_param(param, zeros),
        lambda param: xds.zero.set_full_grad(param, zeros),
    ):
        with pytest.raises(xds.UsageError, match=r"offloaded: call reload_states\(\) first"):
            access(weight)
    del other
    engine.reload_states()
    assert here == devices() == [{"cuda"}, {"cuda"}]
    losses += train(engine, 2, 5)
    engine.destroy()
    return losses == undisturbed, away, freed


@pytest.mark.parametrize(
    ("stage", "include", "pins"), [(3, None, True), (2, ["optim_states"], False)]
)
def test_states_go_to_the_host_and_come_back_as_they_were(
    stage: int, include: list[str] | None, pins: bool
) -> None:
    for same, away, freed in ranks(2, kernels=True).run(away_and_back, stage, include, pins):
        assert same and freed > 0
        assert away == [{"cpu"}, {"cpu" if include is None else "cuda"}]


def loaded_modules() -> set[str]:
    engine = engine_of(3, "fp32")
    train(engine, 0, 2)
    engine.destroy()
    return {"torch._dynamo", "torch._inductor.compile_fx"} & set(sys.modules)


def test_training_without_compile_does_not_load_inductor() -> None:
    """It takes a second, and torch._dynamo.reset() loads it where there is a GPU."""
    assert ranks(2, kernels=True).run(loaded_modules) == [{"torch._dynamo"}] * 2


# -- measurements -------------------------------------------------------------------------------------------


def observed(section: dict[str, Any]) -> tuple[int, list[int]]:
    """How often the host waits in a step's micro-batches, and in five `step` after the first two."""
    engine = engine_of(2, "bf16", 3, **section)
    in_micro_batches, in_steps = 0, []
    for step in range(7):
        for micro in range(3):
            inputs = inputs_of(engine, step * 3 + micro)
            in_micro_batches += counted(micro_batch, engine, inputs)
            in_steps.append(counted(engine.step))
    if "flops_profiler" in section:
        assert engine.flops_profile().macs > 0
    engine.destroy()
    return in_micro_batches // 7, in_steps[6:]


def test_a_measurement_waits_where_it_is_on(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "j"}
    profiled = [0, 0, 1, 0, 0, 4] + [0, 0, 1] * 3
    here = ranks(2, kernels=True)
    for section, in_micro_batches, in_steps in (
        ({"csv_monitor": monitor}, 0, [0, 0, 2] * 5),
        # it gathers the times of the third step from all ranks
        ({"report_folder": str(tmp_path)}, 0, [0, 0, 6] + [0, 0, 1] * 4),
        ({"steps_per_print": 2}, 0, [0, 0, 1, 0, 0, 2] * 2 + [0, 0, 1]),
        ({"comms_logger": {"enabled": True, "debug": True}}, 0, [0, 0, 1] * 5),
        ({"watch": {"heartbeat_seconds": 0.05, "notice_seconds": 0.1}}, 0, [0, 0, 1] * 5),
        ({"flops_profiler": {"enabled": True, "profile_step": 3}}, 0, profiled),
        ({"wall_clock_breakdown": True}, 9, [0, 0, 3] * 5),
    ):
        assert here.run(observed, section)[0] == (in_micro_batches, in_steps), section


# -- overflow -----------------------------------------------------------------------------------------------


def overflowing(native: bool) -> tuple[Any, list[float], int, int]:
    """After each step: scale, skipped steps, applied; the losses; waits in micro-batches and in steps."""
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 1}
    engine = engine_of(2, "fp16", 3, fp16=fp16, ops={"native": native})
    found, losses, in_micro_batches, in_steps = [], [], 0, 0
    for step in range(10):
        for micro in range(3):
            inputs = inputs_of(engine, step * 3 + micro)
            if step in (4, 5) and micro == 0:
                inputs[0, 0] = float("inf") if step == 4 else float("nan")
            before = sum(waits().values())
            losses.append(micro_batch(engine, inputs))
            in_micro_batches += sum(waits().values()) - before
            in_steps += counted(engine.step)
        found.append((engine.loss_scale, engine.skipped_steps, engine.was_step_applied()))
    engine.destroy()
    return found, [loss.item() for loss in losses], in_micro_batches, in_steps


def test_the_loss_scale_goes_down_and_up() -> None:
    plain = run_ranks(overflowing, 2, False)
    for number, found in enumerate(ranks(2, kernels=True).run(overflowing, True)):
        steps, losses, in_micro_batches, in_steps = found
        assert steps == plain[number][0]
        powers = [12, 12, 12, 13, 12, 11, 11, 11, 11, 12]
        assert [scale for scale, _, _ in steps] == [2.0**power for power in powers]
        assert losses == pytest.approx(plain[number][1], rel=1e-2, nan_ok=True)
        assert in_micro_batches == 0
        # the clock of samples a second starts; skipped steps compute the norm twice
        assert in_steps == 10 + 1 + 2


# -- data of the engine -------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 46

    def __getitem__(self, at: int) -> Any:
        noise = torch.Generator().manual_seed(at)
        nested = {"number": torch.tensor(at), "list": [torch.ones(3)]}
        x, y = (torch.randn(size, generator=noise) for size in (24, 1))
        return {"x": x, "y": y, "rest": nested}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Any, y: Any, rest: Any) -> Any:
        assert rest["number"].device == rest["list"][0].device == x.device
        found = self.net(x.to(self.net[0].weight.dtype)).float()
        return {"loss": (found[:, :1] - y).square().mean(), "found": found}


def whole_batches() -> tuple[list[float], list[int]]:
    """Losses of train_batch and eval_batch over three epochs, and the waits of each after the first two."""
    import xds

    engine = xds.initialize(WithLoss(), config_of(3, "bf16", 2), training_data=Samples())
    losses: list[Any] = []
    num_waits = []

    def one(call: Callable[..., Any], *args: Any) -> None:
        losses.append(call(*args))

    for step in range(9):
        num_waits.append(counted(one, engine.train_batch))
        if step % 4 == 3:
            num_waits.append(counted(one, engine.eval_batch, iter(engine.training_dataloader)))
    engine.destroy()
    return [loss.item() for loss in losses], num_waits[2:]


def test_batches_of_the_engines_loader_come_on_a_stream_of_their_own() -> None:
    found = ranks(2, kernels=True).run(whole_batches)
    for (losses, num_waits), (expected, _) in zip(found, run_ranks(whole_batches, 2), strict=True):
        assert losses == pytest.approx(expected, rel=3e-2)
        # the norm; none to evaluate, none for a batch
        assert num_waits == [1, 1, 0, 1, 1, 1, 1, 0, 1]


# -- torch's optimizers -------------------------------------------------------------------------------------

# whose arithmetic runs, with masters on the device and on the host. A release of torch without the kernel: 2.11
FUSED = {
    ("AdamW", True): ("xds", "xds"),  # xds's class, which calls torch's kernel
    ("SGD", True): ("torch", "torch"),
    ("Adagrad", True): ("torch", "torch"),
    ("Adagrad", False): ("xds", "torch"),
}


@contextmanager
def without_fused(name: str) -> Iterator[None]:
    """torch's class refuses its fused kernel on CUDA, as Adagrad of torch 2.11 does."""
    kind = getattr(torch.optim, name)
    step = kind.step

    def refusing(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["fused"] and any(param.is_cuda for param in group["params"]):
                raise RuntimeError(
                    "`fused=True` requires all the params to be of supported devices"
                )
        return step(self, closure)

    kind.step = refusing
    try:
        yield
    finally:
        kind.step = step


def train_with(name: str, is_there: bool, place: str) -> tuple[str, list[float]]:
    """Whose class the optimizer is, and the losses."""
    config = config_of(1, "fp32", 1, offload_optimizer={"device": place})
    more = {"momentum": 0.9} if name == "SGD" else {"eps": 1e-3}
    config["optimizer"] = {"type": name, "params": {"lr": 1e-2, **more}}
    if not is_there:
        with without_fused(name):
            return _train_with(config)
    return _train_with(config)


def _train_with(config: dict[str, Any]) -> tuple[str, list[float]]:
    import xds

    engine = xds.initialize(build(), config)
    losses = train(engine, 0, 4)
    whose = type(engine.optimizer).__module__.partition(".")[0]
    engine.destroy()
    return whose, losses


@pytest.mark.parametrize(("name", "is_there"), FUSED)
def test_torchs_fused_kernels_run_where_they_exist(name: str, is_there: bool) -> None:
    expected = run_ranks(train_with, 2, name, True, "none")
    for place, wanted in zip(("none", "cpu"), FUSED[name, is_there], strict=True):
        found = ranks(2, kernels=True).run(train_with, name, is_there, place)
        for (whose, losses), (_, plain) in zip(found, expected, strict=True):
            assert whose == wanted, place
            assert losses == pytest.approx(plain, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_on_a_gpu_the_kernels_of_device_and_host_train_alike(name: str) -> None:
    found = [run_new_ranks(train_with, 1, name, True, place)[0][1] for place in ("none", "cpu")]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# -- models and loops ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A tied weight, a frozen block, an unused one, a counter, dropout, blocks that may be recomputed."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(24, 40), nn.Linear(24, 40)
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.GELU()) for _ in range(3))
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(40), nn.Linear(40, 7)
        self.register_buffer("calls", torch.zeros(()))
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        found = self.left(x) + self.right(x.flip(0))
        found = found + self.frozen(found)
        for block in self.blocks:
            found = found + self._run(block, found)
        return self.head(self.norm(found))  # type: ignore[no-any-return]

    def _run(self, block: nn.Module, x: Tensor) -> Any:
        def run(x: Tensor) -> Any:
            return self.drop(block(x))

        if not self._recompute:
            return run(x)
        return checkpoint(run, x, use_reentrant=self._recompute == "reentrant")


def trained(stage: int, precision: str, accumulation: int, case: dict[str, Any]) -> Any:
    """Losses and outputs of evaluations; norms, rates; the waits of micro-batches, steps and evaluations.

    case: keys of the config, and `recompute`, `groups`, `torch_optimizer`, `loop`.
    """
    case = dict(case)
    recompute, loop = case.pop("recompute", ""), case.pop("loop", "")
    engine = _engine(stage, precision, accumulation, Odd(recompute), case)
    losses, outputs, rates = [], [], []
    counts = dict.fromkeys(("micro_batch", "step", "eval"), 0)

    def count(name: str, before: int) -> None:
        counts[name] += sum(waits().values()) - before if step >= FIRST else 0

    for step in range(5):
        for micro in range(accumulation):
            inputs = inputs_of(engine, step * accumulation + micro)
            before = sum(waits().values())
            losses.append(_micro_batch(engine, inputs, loop))
            count("micro_batch", before)
            before = sum(waits().values())
            if loop == "clip" and engine.is_gradient_accumulation_boundary():
                engine.clip_grad_norm(0.3)
            engine.step()
            count("step", before)
        rates += [*engine.get_lr(), engine.get_global_grad_norm() or 0.0]
        before = sum(waits().values())
        engine.eval()
        with torch.no_grad():
            outputs.append(engine(inputs))
        engine.train()
        count("eval", before)
    calls = engine.module.calls.item()
    engine.destroy()
    means = [output.float().abs().mean() for output in outputs]
    return [one.item() for one in losses + means], [*rates, calls], counts


def _engine(
    stage: int, precision: str, accumulation: int, model: nn.Module, case: dict[str, Any]
) -> Any:
    import xds

    torch.manual_seed(5)  # dropout
    given: dict[str, Any] = {}
    config = config_of(stage, precision, accumulation)
    params = [param for param in model.parameters() if param.requires_grad]
    if case.pop("groups", False):
        weights, others = ([p for p in params if (p.dim() > 1) is wide] for wide in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
        given["model_parameters"] = groups
        section = {"warmup_num_steps": 3, "warmup_max_lr": [1e-2, 2e-2], "warmup_min_lr": [0, 0]}
        config["scheduler"] = {"type": "WarmupLR", "params": section}
    if name := case.pop("torch_optimizer", ""):
        del config["optimizer"]
        given["optimizer"] = getattr(torch.optim, name)(params, lr=1e-2)
    return xds.initialize(model, config | case, **given)


def _micro_batch(engine: Any, inputs: Tensor, loop: str) -> Tensor:
    loss = engine(inputs).float().square().mean()
    if loop == "no_sync" and not engine.is_gradient_accumulation_boundary():
        with engine.no_sync():
            engine.backward(loss)
    elif loop == "own":
        engine.scale(loss).backward()
    else:
        engine.backward(loss)
    return loss.detach()


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "case"),
    [
        (3, "bf16", 3, {"recompute": "reentrant", "groups": True}),
        (1, "bf16", 3, {"recompute": "again", "loop": "no_sync"}),
        (2, "fp32", 3, {"loop": "clip", "groups": True}),
        (3, "fp16", 1, {"recompute": "again", "loop": "own"}),
        (3, "bf16", 3, {"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
        *(
            (stage, "bf16", 1, {"optimizer": {"type": name, "params": {"lr": 1e-2}}})
            for stage, name in (
                *((3, "Muon"), (3, "Adafactor"), (2, "AdamMini"), (3, "Apollo"), (1, "GaLore")),
                (3, "AdamWScheduleFree"),
            )
        ),
        (0, "bf16", 1, {"torch_optimizer": "NAdam"}),
    ],
)
def test_models_train_as_on_the_cpu_with_one_wait_a_step(
    stage: int, precision: str, accumulation: int, case: dict[str, Any]
) -> None:
    call = (stage, precision, accumulation, case | {"ops": {"native": True}})
    plain = run_processes(trained, 2, *call)
    rel = 1e-4 if precision == "fp32" else 5e-2
    for found, expected in zip(ranks(2, kernels=True).run(trained, *call), plain, strict=True):
        for one, other in zip(found[:2], expected[:2], strict=True):
            assert one == pytest.approx(other, rel=rel, abs=rel / 10)
        # at stage 3 the ranks agree at the begin of each evaluation how many units stay gathered
        assert found[2] == {"micro_batch": 0, "step": 3, "eval": 6 if stage == 3 else 0}


def on_own_stream(*call: Any) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return trained(*call)


def test_a_script_initializes_and_trains_on_a_stream_of_its_own() -> None:
    call = (3, "bf16", 2, {"recompute": "again", "ops": {"native": True}})
    here = ranks(2, kernels=True)
    assert here.run(on_own_stream, *call) == here.run(trained, *call)


# -- checkpoints --------------------------------------------------------------------------------------------


def whole(engine: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = engine.full_state_dict(rank0_only=False, full_precision=True)
    assert all(value.device.type == "cpu" for value in found.values())
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def saved(folder: str) -> tuple[Any, list[float]]:
    """The states that were saved in the background, and the losses of two steps after it."""
    engine = engine_of(3, "bf16", checkpoint={"async_save": True})
    train(engine, 0, 2)
    states = whole(engine)
    before = waits().get("copy_to_host", 0)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    # the tensors are copied with one wait, for their stream; these are the two messages of one agreement
    assert waits().get("copy_to_host", 0) - before <= 2
    losses = train(engine, 2, 4)
    engine.wait_for_checkpoint()
    engine.destroy()
    return states, losses


def resumed(folder: str, stage: int) -> tuple[Any, list[float]]:
    """The states that an engine has after a load, and the losses of two steps after it."""
    import xds

    engine = engine_of(stage, "bf16")
    with torch.no_grad(), xds.zero.GatheredParameters(engine.module, modifier_rank=0):
        for param in engine.module.parameters():
            param.fill_(0.5)
    # its gradients and its gathered weights must not stay
    micro_batch(engine, inputs_of(engine, 9))
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"epoch": 3} and engine.global_steps == 2
    states = whole(engine)
    losses = train(engine, 2, 4)
    engine.destroy()
    return states, losses


def test_a_checkpoint_of_the_device_is_that_of_the_cpu(tmp_path: Path) -> None:
    """It is loaded by the same ranks, at another stage, and by ranks of the CPU."""
    import xds

    folder, here = str(tmp_path), ranks(2, kernels=True)
    (states, losses), _ = here.run(saved, folder)
    assert here.run(resumed, folder, 3)[0][1] == losses
    again, _ = here.run(resumed, folder, 0)[0]
    elsewhere, plain = run_processes(resumed, 2, folder, 0)[0]
    assert all(same(states, one) for one in (again, elsewhere, xds.get_fp32_state_dict(folder)))
    assert losses == pytest.approx(plain, rel=3e-2)


# -- what other tests found on the device -------------------------------------------------------------------


class _Twice(nn.Module):
    """Every layer is called twice. In a reentrant checkpoint it gets its second gradient when it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
        return x.square().mean()


def late(reentrant: bool) -> list[float]:
    import xds

    config = config_of(0, "fp32", 1)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = xds.initialize(_Twice(), config)
    norms = []
    for _ in range(2):
        x = torch.ones(2, 12, device=engine.device).requires_grad_()
        engine.backward(engine(x, reentrant and engine.global_rank == 0))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms


def test_late_gradients_of_one_rank_do_not_change_the_order_of_messages() -> None:
    found, plain = (ranks(2, kernels=True).run(late, reentrant)[0] for reentrant in (True, False))
    assert found == pytest.approx(plain, **near("fp32"))


def of_the_device(folder: str) -> list[Any]:
    path = f"{folder}/{torch.distributed.get_rank()}.pt"
    x, weight = torch.ones(1, device="cuda"), torch.ones(2, 2, device="cuda")
    with torch.inference_mode():
        found: list[Any] = [x.view(1, 1).is_inference()]  # as its base
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found += [(weight @ weight).dtype, (weight @ weight).softmax(0).dtype]
    torch.save(weight, path)
    return [*found, torch.load(path).device.type, isinstance(0, torch.cuda.device)]


def test_views_autocast_and_saved_tensors_are_those_of_a_device(tmp_path: Path) -> None:
    for found in ranks(2, kernels=True).run(of_the_device, str(tmp_path)):
        assert found == [False, torch.bfloat16, torch.float32, "cuda", False]


# -- a device without streams, page-locked memory and fp64, as Apple's --------------------------------------


class Refused(TorchDispatchMode):
    """An op that makes fp64 on the device fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                assert leaf.device.type == "cpu", f"{func} makes fp64 on the device"
        return out


def trained_on_a_bare_device(stage: int, zero: dict[str, Any], *, bare: bool) -> Any:
    import xds
    from xds.ops.device import device_of

    device = device_of(torch.device("cuda", 0)) if bare else device_of(torch.device("cpu"))
    answers = dict.fromkeys(("has_streams", "pins_memory", "has_fp64"), False) if bare else {}
    with ExitStack() as stack:
        if bare:
            stack.enter_context(mock.patch.multiple(device, **answers))
            stack.enter_context(Refused())
        engine = xds.initialize(build(), config_of(stage, "fp32", 2, **zero))
        found = run_steps(engine, 0, 3)
        engine.destroy()
    return found["losses"], found["norms"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_device_without_streams_page_locks_and_fp64_trains(stage: int) -> None:
    on_host = {"device": "cpu", "pin_memory": True}
    zero = {"offload_optimizer": on_host, "offload_param": on_host} if stage == 3 else {}
    found = ranks(2, gloo=True).run(partial(trained_on_a_bare_device, bare=True), stage, zero)
    plain = run_ranks(partial(trained_on_a_bare_device, bare=False), 2, stage, zero)
    for (losses, norms), (of_plain, norms_of_plain) in zip(found, plain, strict=True):
        assert losses == pytest.approx(of_plain, rel=1e-5)
        assert norms == pytest.approx(norms_of_plain, rel=1e-5)
