"""The kernels of compiled and of 8-bit blocks in a plan."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from xds.engine.config.config import parse_config
from xds.engine.planning.models import ModelSource
from xds.engine.planning.plan import make_plan
from xds.engine.planning.work import Kernel

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
    common = {"train_micro_batch_size_per_gpu": TOKENS, "bf16": {"enabled": True}}
    plan = make_plan(Source(), parse_config(common | config), 1, 1)
    seen = plan.observed[0].backward if is_backward else plan.observed[0].forward
    found: Counter[Kernel] = Counter()
    for events in seen[1]:
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
