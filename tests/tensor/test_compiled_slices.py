"""Slices compute what eager blocks and torch's `parallelize_module` compute; compiled they are one graph."""

from __future__ import annotations

from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from warm_ranks import warm

import xds

WIDTH, HEAD_DIM, SAMPLES, LENGTH, CLASSES, STEPS = 16, 4, 2, 6, 8, 3
PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.arange(SAMPLES * LENGTH) % CLASSES)


def train(section: dict[str, Any] | None, stage: int = 0, dropout: float = 0.0) -> Any:
    """Losses and norms, and how many graphs torch made."""
    torch.manual_seed(3)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    tensor = {"tp_size": 2, "plan": PLAN}
    config = runs.config(stage, params={"eps": 1e-2}, tensor_parallel=tensor)
    if section is not None:
        config["compile"] = {"enabled": True, **section}
    engine = xds.initialize(Model(dropout), config)
    shape = (SAMPLES, LENGTH, WIDTH)
    found = runs.train(
        engine,
        STEPS,
        lambda step, _: torch.randn(shape, generator=torch.Generator().manual_seed(step)),
    )
    engine.destroy()
    return found, counters["stats"]["unique_graphs"]


def refused(*args: Any) -> str:
    with pytest.raises(xds.UsageError) as caught:
        train(*args)
    return str(caught.value)


def test_a_compiled_block_is_one_graph_with_the_numbers_of_an_eager_one() -> None:
    section = {"backend": "aot_eager", "kwargs": {"fullgraph": True}}
    (compiled, graphs), other = warm(2).run(train, section, 3)
    (eager, no_graphs), _ = warm(2).run(train, None, 3)
    assert (compiled, graphs) == other
    # one for each block, and one for the proof in evaluation mode
    assert (graphs, no_graphs) == (3, 0)
    assert torch.tensor(compiled).allclose(torch.tensor(eager), rtol=1e-6, atol=0)


def test_dropout_in_a_compiled_block_is_refused() -> None:
    for message in warm(2).run(refused, {"backend": "aot_eager"}, 0, 0.1):
        assert "tensor ranks need different random numbers" in message


# -- torch's own slices -------------------------------------------------------------------------------------

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


def test_slices_compute_what_dtensor_computes() -> None:
    for (loss, grads), (their_loss, their_grads) in warm(2).run(both, 7):
        torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
        assert grads.keys() == their_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, their_grads[name], rtol=1e-5, atol=1e-7, msg=name)
