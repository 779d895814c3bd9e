"""Updates that a device decides itself: the host reads the norm while they run. See zero/core/agreement.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks
from test_rehearsal import batch, build, config_of, waits


def log_of_a_step(config: dict[str, Any]) -> tuple[int, list[str], int]:
    """The number of masters, what the third step launched, and how often the host waited in it."""
    import xds

    engine = xds.initialize(build(), config)
    dtype = next(engine.module.parameters()).dtype
    ops = torch.ops.host_cuda
    for step in range(3):
        loss = engine(batch(step, engine.device, dtype)).float().square().mean()
        engine.backward(loss)
        ops.take_log()
        before = sum(waits().values())
        ops.settings(True, False)
        engine.step()
        ops.settings(False, False)
    num_masters = len(engine._parts.updater.masters)
    engine.destroy()
    return num_masters, ops.take_log(), sum(waits().values()) - before


@pytest.mark.parametrize(
    ("world_size", "stage", "precision"),
    [
        (1, 0, "bf16"),
        (2, 2, "bf16"),
        pytest.param(2, 3, "bf16", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_one_launch_for_each_flat_and_two_and_hides_the_wait(
    world_size: int, stage: int, precision: str
) -> None:
    config = config_of(stage, precision, 1) | {"ops": {"native": True}}
    for num_masters, log, num_waits in ranks(world_size, kernels=True).run(log_of_a_step, config):
        assert num_waits == 1
        update = "aten::_fused_adamw_" if precision == "fp32" else "xds::adam_"
        first = log.index("op 0 aten::_foreach_add_")
        launched = [line for line in log[first:] if line.startswith("op 0 ")]
        assert len(launched) + 1 == num_masters + 2  # and the decision
        assert launched.count(f"op 0 {update}") == num_masters
        assert log.index("sync event") > log.index(f"op 0 {update}")


def train(config: dict[str, Any], bad: float, *, decides: bool) -> list[Any]:
    """What a script sees: losses, norms, scales, steps, weights, states. The third batch has `bad` in it."""
    import xds
    from xds.utils.errors import XdsError
    from xds.zero.core.update import Updater

    kept = Updater.takes_decisions
    if not decides:
        Updater.takes_decisions = property(lambda _: False)
    found: list[Any] = []
    try:
        engine = xds.initialize(build(), config)
        dtype = next(engine.module.parameters()).dtype
        assert engine._parts.updater.takes_decisions is decides
        for step in range(6):
            inputs = batch(step, engine.device, dtype)
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
        Updater.takes_decisions = kept
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "bad"),
    [
        (2, 2, "fp16", float("inf")),
        (1, 0, "bf16", float("nan")),
        pytest.param(2, 0, "fp32", float("nan"), marks=pytest.mark.slow),
        pytest.param(2, 3, "fp16", float("inf"), marks=pytest.mark.slow),
    ],
)
def test_a_device_decides_as_the_host(
    world_size: int, stage: int, precision: str, bad: float
) -> None:
    config = config_of(stage, precision, 1) | {"ops": {"native": True}}
    here = ranks(world_size, kernels=True)
    decided = here.run(_decided, config, bad)
    assert repr(decided) == repr(here.run(_not_decided, config, bad))  # repr: nan is not nan
    if bad != 1.0:
        assert decided[0][-1][0] == 5  # of six steps


def _decided(config: dict[str, Any], bad: float) -> list[Any]:
    return train(config, bad, decides=True)


def _not_decided(config: dict[str, Any], bad: float) -> list[Any]:
    return train(config, bad, decides=False)


def edited(config: dict[str, Any]) -> tuple[str, list[float], list[float]]:
    """Rank 1 alone writes to a parameter: the message, and the parameter before and after the step."""
    import xds

    engine = xds.initialize(build(), config)
    weight = engine.module[0].bias
    dtype = weight.dtype
    for step in range(2):
        loss = engine(batch(step, engine.device, dtype)).float().square().mean()
        engine.backward(loss)
        message = ""
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


@pytest.mark.parametrize("precision", ["bf16"])
def test_parameters_that_differ_over_the_ranks_are_found_before_anything_is_published(
    precision: str,
) -> None:
    config = config_of(2, precision, 1) | {"ops": {"native": True}}
    for message, before, after in ranks(2, kernels=True).run(edited, config):
        assert "each rank still has its own values, and nothing was updated" in message
        assert before == after
