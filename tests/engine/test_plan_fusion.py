"""The kernels of compiled, recomputed and 8-bit blocks in a plan."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from xds.engine.config.config import parse_config
from xds.engine.model.recompute import Recomputing
from xds.engine.planning.models import ModelSource
from xds.engine.planning.plan import make_plan
from xds.engine.planning.work import MATRIX, Kernel, KernelWatch
from xds.ops.comm.fake import Journal

TOKENS, WIDTH, INNER = 32, 128, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@final
class Source(ModelSource):
    name = "blocks"

    def build(self) -> nn.Module:
        return Model()

    def batch(self, micro_batch_size: int) -> Any:
        return torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)


def kernels(config: dict[str, Any], *, is_backward: bool) -> Counter[Kernel]:
    """Of the second block."""
    return kernels_of("backward" if is_backward else "forward", config)


def kernels_of(what: str, config: dict[str, Any]) -> Counter[Kernel]:
    """what: a field of `Activations`."""
    common = {"train_micro_batch_size_per_gpu": TOKENS, "bf16": {"enabled": True}}
    plan = make_plan(Source(), parse_config(common | config), 1, 1)
    found: Counter[Kernel] = Counter()
    for events in getattr(plan.observed[0], what)[1]:
        assert isinstance(events, Counter)
        found += events
    return found


def fused(config: dict[str, Any], *, is_backward: bool) -> list[int]:
    counts = kernels({"compile": {"enabled": True}} | config, is_backward=is_backward)
    assert {kernel.name for kernel in counts} == {"fused", "mm"}
    return sorted(k.size_bytes for k in counts.elements() if k.name == "fused")


def test_a_compiled_block_reads_and_writes_what_products_need() -> None:
    narrow, wide = 2 * TOKENS * WIDTH, 2 * TOKENS * INNER
    # the sum reads two tensors and writes one; so does silu and the product of the two halves
    assert fused({}, is_backward=False) == [3 * narrow, 3 * wide]
    # gradients of the halves: of a gradient and the halves; silu(gate) is computed again, not read
    assert fused({}, is_backward=True)[-1] == 5 * wide
    eager = kernels({}, is_backward=True)
    assert sum(k.size_bytes for k in eager.elements() if k.name != "mm") > 5 * wide + 6 * narrow


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_products_in_8_bits_have_their_dtype_and_bytes() -> None:
    config = {"float8": {"enabled": True, "filter": ["gate", "up", "down"]}}
    found = kernels(config, is_backward=False)
    products = [kernel for kernel in found.elements() if kernel.name == "mm"]
    assert [kernel.dtype for kernel in products] == ["float8"] * 3
    flops = 2 * TOKENS * WIDTH * INNER
    assert [kernel.flops for kernel in products] == [flops] * 3
    wide = TOKENS * WIDTH + WIDTH * INNER + 2 * TOKENS * INNER  # 8 bits in, 16 bits out
    assert max(kernel.size_bytes for kernel in products) == wide
    casts = [k for k in found.elements() if k.name != "mm" and k.dtype == "float8"]
    assert len(casts) == 6  # an input and a weight for each product


def test_a_recomputation_runs_what_the_backward_needs() -> None:
    """torch ends it where the last saved tensor is there: `down` does not run again."""
    model, journal = Model().to(torch.bfloat16), Journal()
    recomputing = Recomputing(list(model.blocks))
    recomputing.begin()
    loss = model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    with KernelWatch(journal):
        loss.backward()
    ran: Counter[Kernel] = Counter()
    for events in journal.events:
        assert isinstance(events, Counter)
        ran += events
    again, backward = (kernels_of(what, {}) for what in ("again", "backward"))
    products = [k for k in (again + backward).elements() if k.kind == MATRIX]
    assert len(products) == 2 + 6
    assert Counter(3 * products) == Counter({k: n for k, n in ran.items() if k.kind == MATRIX})
    compiled = kernels_of("again", {"compile": {"enabled": True}})
    assert sum(n for k, n in compiled.items() if k.kind == MATRIX) == 2
