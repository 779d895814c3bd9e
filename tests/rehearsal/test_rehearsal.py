"""The engine on a CUDA device that is host memory: numbers, streams, and waits of the host. See stand_in.py.

All tests share two ranks. What the other files of this folder import is at the top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from helpers import run_ranks
from runs import config
from torch import Tensor, nn

STEPS, FIRST = 4, 2  # waits are counted after the first steps: the clock of samples a second starts


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 40)),
        *(nn.GELU(), nn.Linear(40, 7)),
    )


def config_of(stage: int, precision: str, accumulation: int, **zero: Any) -> dict[str, Any]:
    more = {"steps_per_print": 10**6, "ops": {"native": False}}
    return config(
        *(stage, precision),
        samples=4,
        accumulation=accumulation,
        params={"eps": 1e-3},
        clip=0.5,
        zero=zero,
        **more,
    )


def batch(step: int, device: Any, dtype: Any) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inputs_of(engine: Any, number: int) -> Tensor:
    return batch(number, engine.device, next(engine.module.parameters()).dtype)


def waits() -> dict[str, int]:
    """How often the host has waited for the device, by reason, without worker threads."""
    if not hasattr(torch.ops.host_cuda, "counts"):
        return {}
    from stand_in import waits_of_host

    return waits_of_host()


def counts() -> Tensor:
    """Waits of the host, and page locks."""
    if not hasattr(torch.ops.host_cuda, "counts"):
        return torch.zeros(2, dtype=torch.int64)
    from stand_in import num_page_locks

    return torch.tensor([sum(waits().values()), num_page_locks()])


def near(precision: str) -> dict[str, float]:
    rel = 1e-5 if precision == "fp32" else 2e-2
    return {"rel": rel, "abs": rel / 10}


def run_steps(engine: Any, first: int, last: int, *, bad: int = -1) -> dict[str, Any]:
    """Losses and norms of the steps [first, last), and what the host waited for. Step `bad` overflows."""
    losses, norms, found = [], [], torch.zeros(2, 2, dtype=torch.int64)
    for step in range(first, last):
        total = []
        for micro in range(engine.gradient_accumulation_steps()):
            inputs = inputs_of(engine, step * 5 + micro) * (torch.inf if step == bad else 1)
            before = counts()
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            between = counts()
            engine.step()
            if step >= FIRST:
                found += torch.stack([between - before, counts() - between])
            total.append(loss.detach())
        losses.append(torch.stack(total).sum())
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    locks = int(found[:, 1].sum())
    waited = {"in_micro_batches": int(found[0, 0]), "in_steps": int(found[1, 0]), "locks": locks}
    return {"losses": [loss.item() for loss in losses], "norms": norms, **waited}


def sums_of(engine: Any) -> list[float]:
    """Of each parameter and of a moment."""
    import xds

    moment = xds.zero.get_full_optimizer_state
    found = []
    for param in engine.module.parameters():
        for whole in (xds.zero.get_full_param(param), moment(param, "exp_avg")):
            found.append(float(whole.double().abs().sum()))
    return found


# -- the stand-in finds faults ------------------------------------------------------------------------------


def missing_wait() -> None:
    x = torch.ones(8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)  # does not wait for the stream that made x


def freed_in_flight() -> None:
    x = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    side.synchronize()
    with torch.cuda.stream(side):
        y.mul_(x)
    del x


def read_too_early() -> None:
    """A copy to the host, and from there to the device on a stream that does not wait for it."""
    kept = torch.zeros(4, pin_memory=True)
    there, back = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kept.copy_(there, non_blocking=True)
    with torch.cuda.stream(side):
        back.copy_(kept, non_blocking=True)
    torch.cuda.synchronize()


def tensor_of_the_host() -> None:
    torch.ones(4, device="cuda") + torch.ones(4)


SAID = {
    missing_wait: r"aten::add on stream \d+ writes what stream 0 wrote",
    freed_in_flight: r"is freed on stream 0 while stream \d+ uses it",
    read_too_early: "a copy of stream 0 still uses its page-locked memory",
    tensor_of_the_host: "on the same device, but found at least two",
}


def faults() -> list[str]:
    """What is said of each function of SAID."""
    found = []
    for function in SAID:
        said = []
        try:
            function()
        except RuntimeError as error:
            said.append(str(error))
        found.append("\n".join([*said, *torch.ops.host_cuda.take_faults()]))
    return found


def copies() -> list[Any]:
    """What page-locked memory has before the host waits and after; a chain of copies of one stream."""
    target = torch.zeros(4, pin_memory=True)
    target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    early = target.isnan().all().item()
    torch.cuda.synchronize()
    kept = torch.zeros(4, pin_memory=True)
    kept.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    back = torch.zeros(4, device="cuda").copy_(kept, non_blocking=True)
    del kept  # torch's allocator allows it
    return [early, target.tolist(), back.tolist()]


@pytest.mark.slow
def test_races_memory_in_flight_and_tensors_of_the_host_are_faults() -> None:
    for found in ranks(2, kernels=True).run(faults):
        for text, said in zip(found, SAID.values(), strict=True):
            assert re.search(said, text), text


def test_a_copy_to_page_locked_memory_arrives_when_the_host_waits() -> None:
    assert ranks(2, kernels=True).run(copies) == [[True, [1.0] * 4, [1.0] * 4]] * 2


# -- training -----------------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> dict[str, Any]:
    import xds

    engine = xds.initialize(build(), config)
    assert next(engine.module.parameters()).device.type == engine.device.type
    found = run_steps(engine, 0, STEPS) | {"sums": sums_of(engine)}
    engine.destroy()
    return found


def check(config: dict[str, Any], precision: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Compare with the CPU; what each rank has found."""
    found = ranks(num_ranks, kernels=True).run(train, config)
    for mine, expected in zip(found, run_ranks(train, num_ranks, config), strict=True):
        for name in ("losses", "norms", "sums"):
            assert mine[name] == pytest.approx(expected[name], **near(precision)), name
        assert (mine["in_micro_batches"], mine["locks"]) == (0, 0)
    return found


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "bf16"), (0, "fp32"), (1, "fp32"), (2, "fp16"), (3, "bf16")]
)
@pytest.mark.quick("0-fp32", "2-fp16", "3-bf16")
def test_training_has_the_numbers_of_the_cpu_and_no_race(stage: int, precision: str) -> None:
    for found in check(config_of(stage, precision, 2), precision):
        assert found["in_steps"] <= STEPS - FIRST  # the norm, once a step


@pytest.mark.slow
def test_four_ranks_train_as_on_the_cpu() -> None:
    check(config_of(3, "bf16", 2), "bf16", 4)


def log_of_a_step(config: dict[str, Any]) -> tuple[int, list[str], int]:
    """The number of masters, what the third step launched, and how often the host waited in it."""
    import xds

    engine = xds.initialize(build(), config)
    ops = torch.ops.host_cuda
    for step in range(3):
        engine.backward(engine(inputs_of(engine, step)).float().square().mean())
        ops.take_log()
        before = sum(waits().values())
        ops.settings(True, False)
        engine.step()
        ops.settings(False, False)
    num_masters = len(engine._parts.updater.masters)
    engine.destroy()
    return num_masters, ops.take_log(), sum(waits().values()) - before


@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_is_one_launch_for_each_flat_and_two_and_hides_the_wait(stage: int) -> None:
    config = config_of(stage, "bf16", 1) | {"ops": {"native": True}}
    for num_masters, log, num_waits in ranks(2, kernels=True).run(log_of_a_step, config):
        assert num_waits == 1
        first = log.index("op 0 aten::_foreach_add_")
        launched = [line for line in log[first:] if line.startswith("op 0 ")]
        assert len(launched) + 1 == num_masters + 2  # and the decision
        assert launched.count("op 0 xds::adam_") == num_masters
        assert log.index("sync event") > log.index("op 0 xds::adam_")


def train_with_a_bad_batch(config: dict[str, Any], bad: float, *, decides: bool) -> list[Any]:
    """What a script sees: losses, norms, scales, steps, weights, states. The third batch has `bad` in it."""
    import xds
    from xds.utils.errors import XdsError
    from xds.zero.model.update import Updater

    kept = Updater.takes_decisions
    if not decides:
        Updater.takes_decisions = property(lambda _: False)  # type: ignore[assignment,method-assign]
    found: list[Any] = []
    try:
        engine = xds.initialize(build(), config)
        assert engine._parts.updater.takes_decisions is decides
        for step in range(6):
            inputs = inputs_of(engine, step)
            if step == 2:
                inputs[0, 0] = bad
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            try:
                engine.step()
            except XdsError as error:
                found.append(str(error))
            found += [loss.item(), engine.get_global_grad_norm(), engine.global_steps]
            found += [engine.skipped_steps, engine._parts.loss_scale.value]
        found += [xds.zero.get_full_param(one).tolist() for one in engine.module.parameters()]
        states = engine.optimizer.state.values()
        found += [[state["step"].item(), state["exp_avg"].tolist()] for state in states]
        engine.destroy()
    finally:
        Updater.takes_decisions = kept  # type: ignore[method-assign]
    return found


def both_ways(config: dict[str, Any], bad: float) -> list[list[Any]]:
    """The device decides, and the host does."""
    return [train_with_a_bad_batch(config, bad, decides=decides) for decides in (True, False)]


@pytest.mark.parametrize(("stage", "precision", "bad"), [(2, "fp16", "inf"), (0, "bf16", "nan")])
def test_a_device_decides_as_the_host(stage: int, precision: str, bad: str) -> None:
    config = config_of(stage, precision, 1) | {"ops": {"native": True}}
    for device, host in ranks(2, kernels=True).run(both_ways, config, float(bad)):
        assert repr(device) == repr(host)  # repr: nan is not nan
        assert device[-1][0] == 5  # of six steps


def edited(config: dict[str, Any]) -> tuple[str, list[float], list[float]]:
    """Rank 1 alone writes to a parameter: the message, and the parameter before and after the step."""
    import xds

    engine = xds.initialize(build(), config)
    weight, message = engine.module[0].bias, ""
    for step in range(2):
        engine.backward(engine(inputs_of(engine, step)).float().square().mean())
        if step and dist.get_rank():
            with torch.no_grad():
                weight.add_(1.0)
        before = weight.tolist()
        try:
            engine.step()
        except xds.UsageError as error:
            message = str(error)
    after = weight.tolist()
    engine.destroy()
    return message, before, after


def test_parameters_that_differ_over_the_ranks_are_found_before_anything_is_published() -> None:
    config = config_of(2, "bf16", 1) | {"ops": {"native": True}}
    for message, before, after in ranks(2, kernels=True).run(edited, config):
        assert "each rank still has its own values, and nothing was updated" in message
        assert before == after


# -- states and parameters on the host or a disk ------------------------------------------------------------


def offloaded(
    optimizer: str, params: str, folder: Path, *, pin: bool = True, **more: Any
) -> dict[str, Any]:
    """Keys of `zero_optimization`. optimizer, params: "none", "cpu" or "nvme". more: of offload_optimizer."""
    where = {"nvme_path": str(folder), "pin_memory": pin}
    sections: dict[str, Any] = {}
    if optimizer != "none":
        sections["offload_optimizer"] = {"device": optimizer, **where, **more}
    if params != "none":
        sections["offload_param"] = {"device": params, "max_in_cpu": 0, **where}
    return sections


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "optimizer", "params", "in_steps"),
    [
        (2, "bf16", 3, "cpu", "none", 2),
        (3, "fp32", 1, "nvme", "nvme", 6),
        (3, "bf16", 1, "none", "cpu", 2),
    ],
)
@pytest.mark.quick("3-fp32-1-nvme-nvme-6")
def test_offloaded_training_has_the_numbers_of_the_cpu_and_no_race(
    stage: int,
    precision: str,
    accumulation: int,
    optimizer: str,
    params: str,
    in_steps: int,
    tmp_path: Path,
) -> None:
    zero = offloaded(optimizer, params, tmp_path)
    for found in check(config_of(stage, precision, accumulation, **zero), precision):
        assert found["in_steps"] <= in_steps


@pytest.mark.slow
def test_other_choices_of_offload(tmp_path: Path) -> None:
    for stage, precision, accumulation, optimizer, more in (
        (2, "bf16", 1, "cpu", {"overlap_step": True}),
        (3, "fp32", 1, "cpu", {"super_offload": True}),
        (2, "bf16", 3, "cpu", {"ratio": 0.5}),
        (0, "bf16", 3, "cpu", {"pin": False}),
        (3, "bf16", 3, "nvme", {"pin": False}),
    ):
        zero = offloaded(optimizer, "none" if stage < 3 else optimizer, tmp_path, **more)
        config = config_of(stage, precision, accumulation, **zero)
        found = ranks(2, kernels=True).run(train, config)
        for mine, expected in zip(found, run_ranks(train, 2, config), strict=True):
            for name in ("losses", "norms", "sums"):
                assert mine[name] == pytest.approx(expected[name], **near(precision)), more
            assert mine["locks"] == 0


def overflowed(config: dict[str, Any]) -> tuple[list[float], list[float], Any]:
    import xds

    engine = xds.initialize(build(), config)
    losses = run_steps(engine, 0, 5, bad=2)["losses"]
    found = losses[:2] + losses[3:], sums_of(engine), (engine.skipped_steps, engine.loss_scale)
    engine.destroy()
    return found


def test_an_overflow_is_skipped_as_on_the_cpu(tmp_path: Path) -> None:
    config = config_of(2, "fp16", 1, **offloaded("cpu", "none", tmp_path))
    found = ranks(2, kernels=True).run(overflowed, config)
    for mine, expected in zip(found, run_ranks(overflowed, 2, config), strict=True):
        assert mine[2] == expected[2] and mine[2][0] == 1
        assert mine[0] == pytest.approx(expected[0], rel=2e-2)
        assert mine[1] == pytest.approx(expected[1], rel=5e-2)


def resumed(config: dict[str, Any], folder: str) -> list[Any]:
    """Losses and sums at the end, of one run, and of another one from its checkpoint."""
    import xds

    engine = xds.initialize(build(), config)
    run_steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    ends = [(run_steps(engine, 2, 5)["losses"], sums_of(engine))]
    engine.destroy()
    engine = xds.initialize(build(), config)
    run_steps(engine, 0, 1)
    engine.load_checkpoint(folder)
    ends.append((run_steps(engine, 2, 5)["losses"], sums_of(engine)))
    engine.destroy()
    return ends


@pytest.mark.slow
def test_a_checkpoint_continues_with_the_same_bits(tmp_path: Path) -> None:
    config = config_of(2, "bf16", 1, **offloaded("cpu", "none", tmp_path))
    for plain, again in ranks(2, kernels=True).run(resumed, config, str(tmp_path / "out")):
        assert plain == again


def accessed(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A model that is built in shards; a script reads and writes its parameters between steps."""
    import xds

    torch.manual_seed(3)
    with xds.zero.Init(config=config):
        model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 40), nn.Linear(40, 7))
    with xds.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for at, param in enumerate(model.parameters()):
            values = torch.linspace(-0.2, 0.1 + at / 10, param.numel()).view(param.shape)
            if dist.get_rank() == 0:
                param.data.copy_(values)
    engine = xds.initialize(model, config)
    losses = []
    for step in range(3):
        losses += run_steps(engine, step, step + 1)["losses"]
        with xds.zero.GatheredParameters([model[0].weight], modifier_rank=0):
            if dist.get_rank() == 0:
                model[0].weight.data.mul_(1.25)
        full = xds.zero.get_full_param(model[2].weight)
        xds.zero.set_full_param(model[2].weight, full * 0.75)
    found = losses, sums_of(engine)
    engine.destroy()
    return found


@pytest.mark.slow
def test_what_a_script_writes_counts(tmp_path: Path) -> None:
    from helpers import run_processes

    config = config_of(3, "bf16", 1, **offloaded("cpu", "cpu", tmp_path))
    found = ranks(2, kernels=True).run(accessed, config)
    for mine, expected in zip(found, run_processes(accessed, 2, config), strict=True):
        assert mine[0] == pytest.approx(expected[0], rel=3e-2)
        assert mine[1] == pytest.approx(expected[1], rel=3e-2, abs=3e-2)


# -- inputs of recomputed blocks ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def recomputed(config: dict[str, Any], offloads: bool) -> tuple[list[float], list[int]]:
    """Losses, and waits in micro-batches and page locks after the first steps. Some graphs are dropped."""
    import xds

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(4)), nn.Linear(64, 3))
    section = {"activation_checkpointing": {"cpu_checkpointing": offloads}}
    engine = xds.initialize(model, config | section)
    losses, found = [], torch.zeros(2, dtype=torch.int64)
    for step in range(5):
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        # later batches are shorter, and their inputs fit into the memory of the first ones
        inputs = torch.randn(256 - 16 * step, 64, generator=seed)
        inputs = inputs.to(engine.device, engine.module[0].weight.dtype)
        before = counts()
        if step == 3:
            engine(inputs)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        found += counts() - before if step >= FIRST else 0
        engine.step()
        losses.append(loss.detach())
    engine.destroy()
    return [loss.item() for loss in losses], found.tolist()


@pytest.mark.slow
def test_inputs_of_blocks_leave_and_come_back_without_a_wait() -> None:
    here = ranks(2, kernels=True)
    config = config_of(2, "bf16", 1)
    kept, moved = (here.run(recomputed, config, offloads) for offloads in (False, True))
    for (losses, counted), (expected, _) in zip(moved, kept, strict=True):
        assert losses == expected
        assert counted == [0, 0]


def fetched_in_vain() -> list[bool]:
    """The input before the one that is wanted is fetched too, and then nobody wants it."""
    from xds.offload.activations import ActivationOffload

    moves = ActivationOffload(torch.device("cuda"))
    values = [torch.full((1 << 15,), float(at), device="cuda") for at in range(3)]
    first, second = (moves.offload(value) for value in values[:2])
    back = [moves.restore(second)]
    del first, second
    third = moves.offload(values[2])  # into the memory of one of them
    back.append(moves.restore(third))
    same = [bool(one.equal(value)) for one, value in zip(back, values[1:], strict=True)]
    moves.close()
    return same


def test_an_input_that_is_fetched_in_vain_is_freed_after_its_copy() -> None:
    assert ranks(2, kernels=True).run(fetched_in_vain) == [[True, True]] * 2


# -- the trace that benchmarks/gpu_memory reads -------------------------------------------------------------


def states(config: dict[str, Any]) -> list[int]:
    """The optimizer's states after a forward without gradients, after one with; masters; frees of a step."""
    import xds

    engine = xds.initialize(build(), config)
    with torch.no_grad():
        engine(inputs_of(engine, 0))
    found = [sum(map(bool, engine.optimizer.state.values()))]
    loss = engine(inputs_of(engine, 0)).float().square().mean()
    found.append(sum(map(bool, engine.optimizer.state.values())))
    engine.backward(loss)
    ops = torch.ops.host_cuda
    ops.log_memory(True)
    ops.take_log()
    engine.step()
    ops.log_memory(False)
    freed = [line for line in ops.take_log() if line.startswith("free ")]
    found += [len(engine._parts.updater.masters), len(freed)]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.quick("2")
def test_what_stays_is_not_among_activations(stage: int) -> None:
    """States come before the first activation; gradient buffers are allocated again after the first update."""
    config = config_of(stage, "bf16", 1) | {"ops": {"native": True}}
    for before, after, num_masters, num_freed in ranks(2, kernels=True).run(states, config):
        assert before == 0
        assert after == num_masters
        assert num_freed >= num_masters
