"""Compressed messages on a CUDA device that is host memory: their numbers, and waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_ranks import ranks
from helpers import run_processes
from placed_ranks import placed
from test_parallel import STEPS, Trained, config_of, trained
from torch import Tensor

pytestmark = pytest.mark.slow  # by default test_rehearsal, _offload, _decisions and _models run


def train_vector(config: dict[str, Any], hosts_of: int) -> Trained:
    """Over a model whose gradients are exact. hosts_of: so many ranks are on a host."""
    import torch.distributed as dist
    from test_rehearsal import batch, build

    import xds

    with placed([rank // hosts_of for rank in range(dist.get_world_size())]):
        engine = xds.initialize(build(), config)
    dtype = next(engine.module.parameters()).dtype

    def losses_of(step: int) -> Iterator[Callable[[], Tensor]]:
        for micro in range(2):
            inputs = batch(2 * step + micro, engine.device, dtype)
            yield lambda inputs=inputs: engine(inputs).float().square().mean()

    return trained(engine, 2 * STEPS, losses_of)


def one_bit(kind: str) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 1e-2, "freeze_step": 3}
    return {"optimizer": {"type": kind, "params": params}, "gradient_clipping": 0.0}


WEIGHTS, GRADS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
LOCO = {"zeropp_loco_param": {"err_beta": 0.6, "reset_T": 7}}
ADAM, LAMB = "OneBitAdam", "OneBitLamb"
CASES = [
    (2, 2, "bf16", one_bit(ADAM), 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (2, 3, "bf16", {"zero_optimization": WEIGHTS | GRADS}, 1),
            (2, 0, "fp32", one_bit(ADAM), 1),
            (2, 0, "bf16", one_bit(LAMB), None),
            (2, 2, "fp32", {"zero_optimization": GRADS | LOCO}, 1),
            (4, 3, "bf16", {"zero_optimization": {"zero_hpz_partition_size": 2} | WEIGHTS}, 1),
            (4, 3, "fp16", {"zero_optimization": {"mics_shard_size": 2}}, 1),
        )
    ),
]


def config_with(stage: int, precision: str, more: dict[str, Any]) -> dict[str, Any]:
    config = config_of(stage, precision, gradient_accumulation_steps=2)
    zero = config["zero_optimization"] | more.get("zero_optimization", {})
    return config | more | {"zero_optimization": zero}


def assert_near(found: list[Trained], expected: list[Trained], precision: str) -> None:
    """Both have the same losses and norms, up to what compression makes of rounding."""
    near = 1e-3 if precision == "fp32" else 5e-2  # a sign that flips changes many weights a little
    for here, there in zip(found, expected, strict=True):
        assert here.losses == pytest.approx(there.losses, rel=near, abs=near)
        assert here.norms == pytest.approx(there.norms, rel=near, abs=near)
        assert {*here.values} == {*there.values}


@pytest.mark.parametrize(("world_size", "stage", "precision", "more", "num_waits"), CASES)
def test_compressed_messages_have_the_numbers_of_the_cpu(
    world_size: int, stage: int, precision: str, more: dict[str, Any], num_waits: int | None
) -> None:
    config = config_with(stage, precision, more)
    found = ranks(world_size).run(train_vector, config, 2)
    assert_near(found, run_processes(train_vector, world_size, config, 2), precision)
    for here in found:
        assert here.in_micro_batches == 0
        if num_waits is not None:
            assert here.in_steps[-3:] == [num_waits] * 3  # nothing is agreed on for the first time
