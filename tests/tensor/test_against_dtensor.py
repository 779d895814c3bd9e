"""Tests that outputs and gradients of slices are those of torch's `parallelize_module`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compiled_slices import LENGTH, PLAN, SAMPLES, WIDTH, Model
from torch import Tensor, nn
from warm_ranks import warm

Found = tuple[Tensor, dict[str, Tensor]]


def run(model: nn.Module, seed: int) -> Found:
    """The loss, and the gradients on this rank: of the input, and of the parameters or their slices."""
    x = torch.randn(
        SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )
    loss = model(x)
    loss.backward()
    grads: dict[str, Any] = {name: param.grad for name, param in model.named_parameters()}
    local = {name: getattr(grad, "_local_tensor", grad) for name, grad in grads.items()}
    return loss.detach(), {"x": x.grad, **local}  # type: ignore[dict-item]


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(0.0)


def ours(seed: int) -> Found:
    import torch.distributed as dist

    from xds.ops.comm.opening import open_collectives
    from xds.tensor.plan import read_plan
    from xds.tensor.slicing import slice_model

    group = open_collectives(dist.group.WORLD, torch.device("cpu"))
    model = build(seed)
    slice_model(model, read_plan(PLAN, model), group)
    return run(model, seed)


def theirs(seed: int) -> Found:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = build(seed)
    styles = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {name: styles[word]() for name, word in PLAN.items()})
    return run(model, seed)


def both(seed: int) -> tuple[Found, Found]:
    return ours(seed), theirs(seed)


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 7), (4, 1)])
def test_slices_compute_what_dtensor_computes(num_ranks, seed):
    for (loss, grads), (their_loss, their_grads) in warm(num_ranks).run(both, seed):
        torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
        assert grads.keys() == their_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, their_grads[name], rtol=1e-5, atol=1e-7, msg=name)
