"""`deepspeed.checkpointing`: recomputes activations with torch's non-reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..utils.errors import UsageError
from .missing import placeholder


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with its activations recomputed in backward."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


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
    """Does nothing: no argument but `checkpoint_in_cpu` has an effect. Each rank keeps its own activations.

    Raises:
        UsageError: `checkpoint_in_cpu` is True.
    """
    if checkpoint_in_cpu:
        raise UsageError(
            "checkpointing.configure(checkpoint_in_cpu=True): a checkpoint that the script calls keeps its "
            "inputs on the device; set activation_checkpointing.cpu_checkpointing in the config, which "
            "recomputes the model's blocks, and leave this out"
        )


def is_configured() -> bool:
    """True: `checkpoint` needs no configuration."""
    return True


def reset() -> None:
    """Does nothing: no state is kept between steps."""


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
