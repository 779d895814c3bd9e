"""`deepspeed.utils.bwc`: what an `mpu` object says, by any of the names that versions of Megatron gave it."""

from __future__ import annotations

from typing import Any

from ..missing import placeholder

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(mpu: Any, names: tuple[str, ...], what: str, alone: Any) -> Any:
    for name in names:
        method = getattr(mpu, f"get_{name}_{what}", None)
        if method is not None:
            return method()
    return alone


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank's number among those that hold slices of one model; 0 where the model is not sliced."""
    return int(_ask(mpu, _TENSOR, "rank", 0))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """The ranks that hold slices of one model; 1 where the model is not sliced."""
    return int(_ask(mpu, _TENSOR, "world_size", 1))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Their process group; None where the model is not sliced."""
    return _ask(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """The stages of the pipeline; 1 without one."""
    return int(_ask(mpu, _PIPE, "world_size", 1))


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """The process group of a pipeline's stages; None without one."""
    return _ask(mpu, _PIPE, "group", None)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
