"""The table of DeepSpeed's ops: those that xds has under other names, and a sentence for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....ops.libraries import load as load_library
from ....ops.libraries import optimizer_library
from .builder import CUDAOpBuilder, OpBuilder
from .kernels import (
    CPUAdagradOps,
    CPUAdamOps,
    CPULionOps,
    FusedAdamOps,
    FusedLionOps,
    UtilsOps,
)
from .locked import PinMemoryOps

_INFERENCE = "xds is for training only"
_OFFLOAD = "the config's offload_optimizer and offload_param read and write files without it"
_MODEL = "use torch's own layers, which torch.compile fuses"
_QUANTIZE = "xds compresses messages itself, see zero_quantized_gradients in the config"

# class -> op, its variable, and what has its functions
_OURS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "CPUAdagradBuilder": ("cpu_adagrad", "DS_BUILD_CPU_ADAGRAD", CPUAdagradOps),
    "CPUAdamBuilder": ("cpu_adam", "DS_BUILD_CPU_ADAM", CPUAdamOps),
    "CPULionBuilder": ("cpu_lion", "DS_BUILD_CPU_LION", CPULionOps),
    "FusedAdamBuilder": ("fused_adam", "DS_BUILD_FUSED_ADAM", FusedAdamOps),
    "FusedLionBuilder": ("fused_lion", "DS_BUILD_FUSED_LION", FusedLionOps),
    "PinMemoryBuilder": ("pin_memory", "DS_BUILD_PIN_MEMORY", PinMemoryOps),
    "UtilsBuilder": ("utils", "DS_BUILD_UTILS", UtilsOps),
}
_WITHOUT_KERNELS = ("pin_memory", "utils")
# class -> op, its variable, and why xds has none
_OTHERS: dict[str, tuple[str, str, str]] = {
    "AsyncIOBuilder": ("async_io", "DS_BUILD_AIO", _OFFLOAD),
    "CCLCommBuilder": ("deepspeed_ccl_comm", "DS_BUILD_CCL_COMM", "use the backend gloo"),
    "DeepCompileBuilder": ("dc", "DS_BUILD_DEEP_COMPILE", "DeepCompile is not supported"),
    "EvoformerAttnBuilder": ("evoformer_attn", "DS_BUILD_EVOFORMER_ATTN", _MODEL),
    "FPQuantizerBuilder": ("fp_quantizer", "DS_BUILD_FP_QUANTIZER", _QUANTIZE),
    "FusedLambBuilder": ("fused_lamb", "DS_BUILD_FUSED_LAMB", "use FusedLamb itself"),
    "GDSBuilder": ("gds", "DS_BUILD_GDS", _OFFLOAD),
    "InferenceBuilder": ("transformer_inference", "DS_BUILD_TRANSFORMER_INFERENCE", _INFERENCE),
    "InferenceCoreBuilder": ("inference_core_ops", "DS_BUILD_INFERENCE_CORE_OPS", _INFERENCE),
    "InferenceCutlassBuilder": ("cutlass_ops", "DS_BUILD_CUTLASS_OPS", _INFERENCE),
    "NotImplementedBuilder": (
        "deepspeed_not_implemented",
        "DS_BUILD_NOT_IMPLEMENTED",
        "it has no meaning",
    ),
    "QuantizerBuilder": ("quantizer", "DS_BUILD_QUANTIZER", _QUANTIZE),
    "RaggedOpsBuilder": ("ragged_device_ops", "DS_BUILD_RAGGED_DEVICE_OPS", _INFERENCE),
    "RaggedUtilsBuilder": ("ragged_ops", "DS_BUILD_RAGGED_OPS", _INFERENCE),
    "RandomLTDBuilder": (
        "random_ltd",
        "DS_BUILD_RANDOM_LTD",
        "random token dropping is not supported",
    ),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", "DS_BUILD_SHM_COMM", "use the backend gloo"),
    "SpatialInferenceBuilder": ("spatial_inference", "DS_BUILD_SPATIAL_INFERENCE", _INFERENCE),
    "StochasticTransformerBuilder": (
        "stochastic_transformer",
        "DS_BUILD_STOCHASTIC_TRANSFORMER",
        _MODEL,
    ),
    "TransformerBuilder": ("transformer", "DS_BUILD_TRANSFORMER", _MODEL),
}


class _OwnBuilder(OpBuilder):
    """The builder of an op that xds has."""

    ops: Callable[[], Any]

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        """The op. Its kernels for this machine's device are built first; without a compiler torch does it."""
        if self.NAME not in _WITHOUT_KERNELS:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            name = optimizer_library(device)
            if name:
                load_library(name)
        return type(self).ops()

    jit_load = load


def _classes() -> dict[str, type[OpBuilder]]:
    found: dict[str, type[OpBuilder]] = {}
    for title, (name, variable, ops) in _OURS.items():
        own = {"NAME": name, "BUILD_VAR": variable, "ops": ops, "__module__": __package__}
        found[title] = type(title, (_OwnBuilder,), {**own, "__doc__": f"Of the op {name!r}."})
    for title, (name, variable, why) in _OTHERS.items():
        other = {"NAME": name, "BUILD_VAR": variable, "needs": why, "__module__": __package__}
        text = f"Of the op {name!r}, which xds does not have: {why}."
        found[title] = type(title, (CUDAOpBuilder,), {**other, "__doc__": text})
    # LAMB steps as a whole: `load` has no functions of parts of it
    found["FusedLambBuilder"].is_compatible = lambda self, verbose=False: True  # type: ignore[method-assign]
    return found


BUILDERS = _classes()
builder_names = tuple(BUILDERS)

__all__ = ["BUILDERS", "builder_names"]
