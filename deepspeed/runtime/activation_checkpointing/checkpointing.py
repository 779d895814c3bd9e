"""`deepspeed.checkpointing`: recomputes activations with torch's non-reentrant checkpoint.

Each rank keeps the inputs of its own checkpoints whole. `configure` checks DeepSpeed's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....engine.config.text import read_source
from ....utils.errors import UsageError
from ....utils.module_buffers import Buffers, modules_of
from ...errors import raises_theirs
from ...missing import placeholder
from ...utils.logging import logger
from .arguments import detach_variable as detach_variable
from .arguments import extract_tensors as extract_tensors
from .arguments import is_activation_to_checkpoint as is_activation_to_checkpoint
from .arguments import merge_tensors as merge_tensors
from .random_states import CudaRNGStatesTracker as CudaRNGStatesTracker
from .random_states import get_cuda_rng_tracker as get_cuda_rng_tracker
from .random_states import reseed_model_parallel, seed_model_parallel

SECTION = "activation_checkpointing"
# argument of configure -> (key of the section, DeepSpeed's name for the value)
_KEYS = {
    "partition_activations": ("partition_activations", "PARTITION_ACTIVATIONS"),
    "contiguous_checkpointing": ("contiguous_memory_optimization", "CONTIGUOUS_CHECKPOINTING"),
    "num_checkpoints": ("number_checkpoints", "num_layers"),
    "checkpoint_in_cpu": ("cpu_checkpointing", "CPU_CHECKPOINT"),
    "synchronize": ("synchronize_checkpoint_boundary", "SYNCHRONIZE"),
    "profile": ("profile", "PROFILE_TIME"),
}


@final
class _Settings:
    """What `configure` was last called with."""

    def __init__(self) -> None:
        self.is_configured = False
        self.mpu: Any = None
        self.values: dict[str, Any] = {name: None for name in _KEYS}
        self.has_warned = False

    def named(self, name: str) -> Any:
        """The value by DeepSpeed's name; raises KeyError."""
        named = {theirs: argument for argument, (_, theirs) in _KEYS.items()}
        value = self.values[named[name]]
        return value if name == "num_layers" else bool(value)


_settings = _Settings()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with its activations recomputed in backward.

    Buffers of modules that the function calls, such as running statistics, are as after one call.
    """
    if _settings.values["checkpoint_in_cpu"] and not _settings.has_warned:
        _settings.has_warned = True
        logger.warning(
            "checkpointing.configure(checkpoint_in_cpu=True) has no effect on checkpoints that the script "
            "calls: their inputs stay on the device; activation_checkpointing.cpu_checkpointing of the config "
            "recomputes the model's blocks, and moves theirs"
        )
    if not torch.compiler.is_compiling():  # a graph writes each buffer once
        function = Buffers(modules_of(function), copies=False).once(function)
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


@raises_theirs
def configure(  # noqa: PLR0913 (DeepSpeed's arguments)
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Remember the arguments, over those of the config's section activation_checkpointing. None has an effect.

    Raises:
        UsageError: `contiguous_checkpointing` without `partition_activations` and `num_checkpoints`.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    section = {} if deepspeed_config is None else read_source(deepspeed_config)[0].get(SECTION, {})
    values = {
        name: section.get(key) if given[name] is None else given[name]
        for name, (key, _) in _KEYS.items()
    }
    if values["contiguous_checkpointing"]:
        absent = [name for name in ("partition_activations", "num_checkpoints") if not values[name]]
        if absent:
            raise UsageError(
                f"checkpointing.configure(contiguous_checkpointing=True) needs {' and '.join(absent)} too"
            )
    _settings.is_configured = True
    _settings.mpu = mpu_ if mpu_ is not None else _settings.mpu
    _settings.values = values


def is_configured() -> bool:
    """`configure` was called. `checkpoint` works without."""
    return _settings.is_configured


def reset() -> None:
    """Does nothing: no state is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """The number of checkpoints, as `configure(num_checkpoints=...)`."""
    _settings.values["num_checkpoints"] = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Remember the value, as `configure(partition_activations=...)`."""
    _settings.values["partition_activations"] = partition_activation


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank, and the tracked state for regions whose tensors are cut over model-parallel ranks."""
    seed_model_parallel(seed, _model_parallel_rank())


@raises_theirs
def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """A new seed for the tracked state alone.

    Raises:
        UsageError: `model_parallel_cuda_manual_seed` was not called.
    """
    reseed_model_parallel(seed, _model_parallel_rank())


def _model_parallel_rank() -> int:
    return 0 if _settings.mpu is None else int(_settings.mpu.get_model_parallel_rank())


def __getattr__(name: str) -> Any:
    if name == "deepspeed_checkpointing_enabled":
        return _settings.is_configured
    if name == "mpu":
        return _settings.mpu
    try:
        return _settings.named(name)
    except KeyError:
        return placeholder(__name__, name)
