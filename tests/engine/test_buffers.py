"""Which buffers are cast with the parameters, and which stay wide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import config
from torch import Tensor, nn

import xds


class Rotary(nn.Module):
    """As in transformers: no parameters, frequencies that are multiplied with positions in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("table", torch.randn(8))


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("bias_correction",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("bias_correction", torch.zeros(8))


class Model(nn.Module):
    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.router = Router()
        self.norm = nn.BatchNorm1d(8, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.router.weight).square().sum()


def dtypes_after_initialize(
    model: nn.Module, precision: str, **types: Any
) -> dict[str, torch.dtype]:
    engine = xds.initialize(model, config(0, precision, data_types=types))
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    engine.destroy()
    return found


def test_buffers_follow_the_parameters_but_rotary_frequencies_and_named_ones_stay_fp32() -> None:
    for precision, low in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert dtypes_after_initialize(Model(), precision) == {
            "rotary.inv_freq": torch.float32,
            "rotary.table": low,
            "router.bias_correction": torch.float32,
            "norm.running_mean": low,
            "norm.running_var": low,
            "norm.num_batches_tracked": torch.int64,
        }


def test_a_wide_buffer_in_a_model_built_in_bf16_stays_wide() -> None:
    model = Model().to(torch.bfloat16)
    model.rotary.table = model.rotary.table.float()
    found = dtypes_after_initialize(model, "bf16")
    assert found["rotary.table"] == torch.float32
    assert found["norm.running_var"] == torch.bfloat16


def test_in_fp32_no_buffer_changes() -> None:
    model = Model()
    model.rotary.table = model.rotary.table.half()
    found = dtypes_after_initialize(model, "fp32")
    assert found["rotary.table"] == torch.float16 and found["norm.running_var"] == torch.float32


def test_the_config_gives_buffers_a_dtype_but_not_rotary_frequencies() -> None:
    for precision, dtype, low in (
        ("bf16", "fp32", torch.float32),
        ("fp32", "bf16", torch.bfloat16),
        ("fp16", "bf16", torch.bfloat16),
    ):
        model = Model(affine=False)
        model.rotary.table = model.rotary.table.half()
        found = dtypes_after_initialize(model, precision, buffer_dtype=dtype)
        assert found["rotary.inv_freq"] == torch.float32
        assert found["rotary.table"] == found["norm.running_mean"] == low
        assert found["norm.num_batches_tracked"] == torch.int64


def test_named_buffers_are_fp32_whatever_dtype_the_others_get() -> None:
    model = Model(affine=False)
    model.norm.running_var = model.norm.running_var.to(torch.bfloat16)
    found = dtypes_after_initialize(
        model, "bf16", buffer_dtype="bf16", keep_in_fp32_modules=["running_var"]
    )
    assert found["router.bias_correction"] == torch.float32  # its class names it
    assert found["norm.running_var"] == torch.float32
    assert found["norm.running_mean"] == torch.bfloat16


def test_statistics_of_another_dtype_than_a_weight_are_refused_on_a_cpu() -> None:
    """torch's batch norm would fail in the first forward."""
    for precision, types, remedy in (
        ("bf16", {"buffer_dtype": "fp32"}, 'add "BatchNorm1d" to data_types.keep_in_fp32_modules'),
        ("fp32", {"buffer_dtype": "bf16"}, "needs one; remove the key"),
        ("bf16", {"keep_in_fp32_modules": ["running_var"]}, "statistics of norm"),
    ):
        with pytest.raises(xds.UsageError, match=remedy):
            dtypes_after_initialize(Model(), precision, **types)
    types = {"buffer_dtype": "fp32", "keep_in_fp32_modules": ["BatchNorm1d"]}
    engine = xds.initialize(Model(), config(0, "bf16", data_types=types))
    assert engine(torch.ones(4, 8, dtype=torch.bfloat16)).isfinite()
    engine.destroy()
