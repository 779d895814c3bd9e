"""`deepspeed.git_version_info`: the version that is followed, and what this machine has."""

from __future__ import annotations

from typing import Any

from .missing import placeholder
from .stand_in.release import VERSION

version = VERSION
git_hash = "unknown"
git_branch = "unknown"


def __getattr__(name: str) -> Any:
    if name == "installed_ops":  # none of DeepSpeed's libraries is installed
        from .ops.op_builder.builder import ALL_OPS

        return dict.fromkeys(ALL_OPS, False)
    if name == "accelerator_name":
        from .accelerator import get_accelerator

        return get_accelerator().device_name()
    if name == "torch_info":
        return _torch_info()
    return placeholder(__name__, name)


def _torch_info() -> dict[str, Any]:
    import torch

    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": True,
        "cuda_version": torch.version.cuda or "0.0",
        "nccl_version": "0.0",
        "hip_version": torch.version.hip or "0.0",
    }
