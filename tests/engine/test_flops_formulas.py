"""What each operation of torch counts, as a table; and numbers as text."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xds.engine.profiling import formulas, profile, units
from xds.engine.profiling.counter import Backward, OperationCounter, Tally
from xds.engine.profiling.operations import formula_of
from xds.engine.profiling.recorder import Recorder


def r(*shape: int, **how: Any) -> Tensor:
    return torch.rand(*shape, **how)


def counted(call: Callable[[], Any]) -> tuple[int, int, dict[str, int]]:
    """MACs and FLOPs of a call, and the operations that are not known."""
    tally = Tally()
    counter = OperationCounter(tally, Backward())
    with counter:
        call()
    return tally.macs, tally.flops, dict(counter.unknown)


OFFSETS = torch.tensor([3, 8], dtype=torch.int32)
Q, KV = r(2, 4, 16, 8), r(2, 2, 16, 8)  # grouped: two heads of queries for one of keys

# call, MACs, FLOPs beside 2 for each MAC
TABLE: dict[str, tuple[Callable[[], Any], int, int]] = {
    "mm": (lambda: r(4, 8) @ r(8, 5), 160, 0),
    "mv": (lambda: r(4, 8) @ r(8), 32, 0),
    "dot": (lambda: r(8) @ r(8), 8, 0),
    "bmm": (lambda: r(2, 1, 4, 8) @ r(3, 8, 5), 960, 0),
    "linear": (lambda: F.linear(r(3, 4, 8), r(5, 8)), 480, 0),
    "linear, bias": (lambda: F.linear(r(3, 4, 8), r(5, 8), r(5)), 480, 60),
    "addmm": (lambda: torch.addmm(r(1), r(4, 8), r(8, 5)), 160, 20),
    "addmm, beta 0": (lambda: torch.addmm(r(5), r(4, 8), r(8, 5), beta=0), 160, 0),
    "baddbmm": (lambda: torch.baddbmm(r(5), r(2, 4, 8), r(2, 8, 5)), 320, 40),
    "addbmm": (lambda: torch.addbmm(r(5), r(2, 4, 8), r(2, 8, 5)), 320, 20),
    "einsum": (lambda: torch.einsum("bij,bjk->bik", r(2, 3, 4), r(2, 4, 5)), 120, 0),
    "grouped": (lambda: F.grouped_mm(r(8, 16), r(2, 16, 16), offs=OFFSETS), 2048, 0),
    "conv": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 4, 3, 3), r(6)), 2 * 36 * 6 * 36, 2 * 6 * 36),
    "conv, groups": (lambda: F.conv2d(r(2, 4, 8, 8), r(6, 2, 3, 3), groups=2), 2 * 36 * 108, 0),
    "conv, stride": (lambda: F.conv1d(r(1, 4, 9), r(6, 4, 3), stride=2), 4 * 72, 0),
    "conv transposed": (
        lambda: F.conv_transpose2d(r(2, 4, 8, 8), r(4, 3, 3, 3), r(3), stride=2),
        2 * 64 * 108,
        2 * 3 * 17 * 17,
    ),
    "attention": (lambda: F.scaled_dot_product_attention(Q, Q, Q), 32768, 0),
    "attention, causal": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
        32768,
        0,
    ),
    "attention, grouped": (
        lambda: F.scaled_dot_product_attention(Q, KV, KV, enable_gqa=True),
        32768,
        0,
    ),
    "lstm": (lambda: nn.LSTM(8, 16, 2)(r(5, 2, 8)), 10 * 64 * (8 + 16 + 16 + 16), 0),
    "add, broadcast": (lambda: r(4, 1, 7) + r(1, 5, 7), 0, 140),
    "in place": (lambda: r(4, 7).mul_(2.0), 0, 28),
    "whole numbers": (lambda: torch.arange(9) + 1, 0, 0),
    "compared": (lambda: r(4) > r(4), 0, 0),
    "gelu": (lambda: F.gelu(r(4, 7)), 0, 28),
    "softmax": (lambda: r(4, 7).softmax(-1), 0, 28),
    "sum": (lambda: r(4, 7).sum(-1), 0, 28),
    "layer norm": (lambda: F.layer_norm(r(4, 7), (7,)), 0, 4 * 28),
    "layer norm, weight": (lambda: F.layer_norm(r(4, 7), (7,), r(7), r(7)), 0, 5 * 28),
    "group norm": (lambda: F.group_norm(r(2, 4, 7), 2, r(4), r(4)), 0, 5 * 56),
    "batch norm": (lambda: nn.BatchNorm1d(7)(r(4, 7)), 0, 5 * 28),
    "batch norm, stored": (lambda: nn.BatchNorm1d(7).eval()(r(4, 7)), 0, 2 * 28),
    "max pool": (lambda: F.max_pool2d(r(1, 2, 4, 4), 2), 0, 32),
    "average pool": (lambda: F.avg_pool2d(r(1, 2, 4, 4), 2), 0, 32),
    "upsample": (lambda: F.interpolate(r(1, 2, 4, 4), scale_factor=2, mode="bilinear"), 0, 128),
    "cross entropy": (lambda: F.cross_entropy(r(4, 7), torch.tensor([0, 1, 2, 3])), 0, 28 + 4),
    "embedding": (lambda: F.embedding(torch.tensor([1, 2]), r(4, 7)), 0, 0),
    "index add": (lambda: r(4, 7).index_add_(0, torch.tensor([0, 0]), r(2, 7)), 0, 14),
    "copies": (lambda: torch.cat([r(4).clone(), r(4)]).view(2, 4).t().contiguous(), 0, 0),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("inference", [False, True], ids=["grad", "inference"])
def test_an_operation_counts(name: str, inference: bool) -> None:
    call, macs, extra = TABLE[name]
    with torch.inference_mode(inference):
        # layers start with random weights: what that needs does not count
        assert counted(call) == (macs, 2 * macs + extra, {})


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
    forward, backward = Tally(), Backward()
    counter = OperationCounter(forward, backward)
    with counter:
        out = make(r(4, 8, requires_grad=True)).sum()
        out.backward()
    assert backward.gradients.macs == times * forward.macs > 0
    assert not counter.unknown


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_attention_kernels_of_gpus_count(kind: str) -> None:
    """By their shapes, which the meta device computes."""
    x = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    own = () if kind == "flash" else (None, True)
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    macs, flops, unknown = counted(lambda: forward(x, x, x, *own))
    assert (macs, flops, unknown) == (32768, 65536, {})
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    formula = formula_of(backward)
    assert formula is not None and formula((x, x, x, x), {}, None) == (81920, 163840)


def _grouped(x: Tensor) -> Tensor:
    weight = r(2, 16, 16, requires_grad=True)
    return F.grouped_mm(torch.cat([x, x]).repeat(1, 2), weight, offs=OFFSETS)


def test_what_is_not_known_is_named() -> None:
    macs, flops, unknown = counted(lambda: torch.linalg.inv_ex(torch.eye(3)))
    assert (macs, flops) == (0, 0)
    assert unknown == {"aten.linalg_inv_ex.default": 1}


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
    assert found.macs == 2 * 2 * 128 * 128 * 16 and not found.unknown


@pytest.mark.parametrize("module", [formulas, profile, units])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "function, number, text",
    [
        (units.number_to_string, 999, "999 "),
        (units.number_to_string, 1e12, "1 T"),
        (units.number_to_string, 0.5, "500 m"),
        (units.number_to_string, 1e-9, "0 u"),
        (units.macs_to_string, 1500, "1.5 KMACs"),
        (units.flops_to_string, 2.345e9, "2.35 GFLOPS"),
        (units.bytes_to_string, 10, "10 B"),
        (units.params_to_string, 61706, "61.71 K"),
        (units.duration_to_string, 3e-6, "3 us"),
    ],
)
def test_numbers_as_text(function: Callable[[float], str], number: float, text: str) -> None:
    assert function(number) == text
