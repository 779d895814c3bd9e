"""What products count, as a table; and numbers as text."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xds.engine.profiling import profile, units
from xds.engine.profiling.counter import OperationCounter, Tally, known_formulas
from xds.engine.profiling.recorder import Recorder


def r(*shape: int, **how: Any) -> Tensor:
    return torch.rand(*shape, **how)


def counted(call: Callable[[], Any]) -> int:
    """FLOPs of a call."""
    tally = Tally()
    with OperationCounter(tally):
        call()
    return tally.flops


OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
Q, KV = r(2, 4, 16, 8), r(2, 2, 16, 8)  # grouped: two heads of queries for one of keys

# call, MACs
TABLE: dict[str, tuple[Callable[[], Any], int]] = {
    "mm": (lambda: r(4, 8) @ r(8, 5), 160),
    "mv": (lambda: r(4, 8) @ r(8), 32),
    "dot": (lambda: r(8) @ r(8), 8),
    "bmm": (lambda: r(2, 1, 4, 8) @ r(3, 8, 5), 960),
    "linear": (lambda: F.linear(r(3, 4, 8), r(5, 8)), 480),
    "addmm": (lambda: torch.addmm(r(1), r(4, 8), r(8, 5)), 160),
    "baddbmm": (lambda: torch.baddbmm(r(5), r(2, 4, 8), r(2, 8, 5)), 320),
    "addbmm": (lambda: torch.addbmm(r(5), r(2, 4, 8), r(2, 8, 5)), 320),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", r(2, 3, 4), r(2, 4, 5)), 120),
    "grouped": (lambda: F.grouped_mm(r(8, 16), r(2, 16, 16), offs=OFFSETS), 2048),
    "conv": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 4, 3, 3), r(6)), 2 * 36 * 6 * 36),
    "conv, groups": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 2, 3, 3), groups=2), 2 * 36 * 108),
    "conv transposed": (
        lambda: F.conv_transpose2d(r(2, 4, 8, 8), r(4, 3, 3, 3), r(3), stride=2),
        2 * 64 * 108,
    ),
    "attention": (lambda: F.scaled_dot_product_attention(Q, Q, Q), 32768),
    "attention, grouped": (
        lambda: F.scaled_dot_product_attention(Q, KV, KV, enable_gqa=True),
        32768,
    ),
    "lstm": (lambda: nn.LSTM(8, 16, 2)(r(5, 2, 8)), 10 * 64 * (8 + 16 + 16 + 16)),
    "element-wise": (lambda: F.gelu(r(4, 1, 7) + r(1, 5, 7)).softmax(-1).sum(), 0),
    "norm": (lambda: F.layer_norm(r(4, 7), (7,), r(7), r(7)), 0),
    "embedding": (lambda: F.embedding(torch.tensor([1, 2]), r(4, 7)), 0),
}


def test_an_operation_counts() -> None:
    for name, (call, macs) in TABLE.items():
        for inference in (False, True):
            with torch.inference_mode(inference):
                assert counted(call) == 2 * macs, (name, inference)


@pytest.mark.parametrize(
    "name, make, times",
    [
        ("linear", lambda x: F.linear(x, r(5, 8, requires_grad=True)), 2),
        ("data", lambda x: F.linear(x.detach(), r(5, 8, requires_grad=True)), 1),
        ("conv", lambda x: F.conv1d(x[None], r(5, 4, 3, requires_grad=True)), 2),
        ("attention", lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3), 2.5),
        ("lstm", lambda x: nn.LSTM(8, 16)(x[:, None])[0], 2),
        ("grouped", lambda x: _grouped(x) * r(8, 16), 2),
    ],
)
def test_a_backward_counts_its_products(name: str, make: Any, times: float) -> None:
    forward = Tally()
    counter = OperationCounter(forward)
    with counter:
        out = make(r(4, 8, requires_grad=True)).sum()
        out.backward()
    assert counter.gradients.flops == times * forward.flops > 0


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_attention_kernels_of_gpus_count(kind: str) -> None:
    """By their shapes, which the meta device computes."""
    x = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    own = () if kind == "flash" else (None, True)
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    assert counted(lambda: forward(x, x, x, *own)) == 65536
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
    assert known_formulas()[backward](x, x, x, x) == 163840


def _grouped(x: Tensor) -> Tensor:
    weight = r(2, 16, 16, requires_grad=True)
    return F.grouped_mm(torch.cat([x, x]).repeat(1, 2), weight, offs=OFFSETS)


def test_formulas_that_others_register_with_torch_count() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return flex_attention(x, x, x)

    recorder = Recorder(model := Flex())
    with (
        pytest.warns(UserWarning, match="flex_attention called without torch.compile"),
        recorder.forward(),
    ):
        model(r(1, 2, 128, 16))
    found = recorder.profile()
    assert found.macs == 2 * 2 * 128 * 128 * 16


@pytest.mark.parametrize("module", [profile, units])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_numbers_as_text() -> None:
    assert units.number_to_string(999) == "999 " and units.number_to_string(1e12) == "1 T"
    assert units.number_to_string(0.5) == "500 m" and units.number_to_string(1e-9) == "0 u"
    assert units.macs_to_string(1500) == "1.5 KMACs" and units.bytes_to_string(10) == "10 B"
    assert units.flops_to_string(2.345e9) == "2.35 GFLOPS"
    assert units.params_to_string(61706) == "61.71 K" and units.duration_to_string(3e-6) == "3 us"
