"""`deepspeed.ops.op_builder`: whether an op of DeepSpeed has a counterpart here."""

from __future__ import annotations

from typing import Any

import torch

from ....utils.errors import UsageError
from ...errors import raises_theirs
from ...missing import placeholder

# class -> the name of the op, for those whose optimizer or function xds has
_THERE = {
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "UtilsBuilder": "utils",
}
_ABSENT = {
    "AsyncIOBuilder": "async_io",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "QuantizerBuilder": "quantizer",
    "RandomLTDBuilder": "random_ltd",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
}


class OpBuilder:
    """One op of DeepSpeed by name. NAME: its key in `ALL_OPS` and `__compatible_ops__`."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether xds has the optimizer or function of this op."""
        return type(self).__name__ in _THERE

    @staticmethod
    def is_rocm_pytorch() -> bool:
        return torch.version.hip is not None

    @raises_theirs
    def load(self, verbose: bool = False) -> Any:
        """
        Raises:
            UsageError: in any case.
        """
        raise UsageError(
            f"{type(self).__name__}.load(): the op {self.name!r} is not covered: xds builds its own "
            "ops, on first use; use the optimizer, such as deepspeed.ops.adam.DeepSpeedCPUAdam"
        )

    jit_load = builder = load


class CUDAOpBuilder(OpBuilder):
    """The base of the ops that DeepSpeed has for GPUs only."""


def _class(title: str, name: str) -> type[OpBuilder]:
    inside = {"NAME": name, "__module__": __name__, "__doc__": f"Of the op {name!r}."}
    return type(title, (OpBuilder,), inside)


BUILDERS = {title: _class(title, name) for title, name in (_THERE | _ABSENT).items()}
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}


def compatible_ops() -> dict[str, bool]:
    """Whether each op of DeepSpeed has a counterpart here, by the op's name."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> Any:
    return BUILDERS[name] if name in BUILDERS else placeholder(__name__, name)
