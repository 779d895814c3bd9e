"""`deepspeed.checkpointing`: recomputes activations with torch's non-reentrant checkpoint.

Each rank keeps the inputs of its own checkpoints whole. `configure` checks DeepSpeed's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ....ops.device import present
from ....utils.errors import UsageError
from ....utils.module_buffers import Buffers, modules_of
from ...config.text import read_source
from ..errors import methods_raise_theirs, raises_theirs
from .log import warning_once


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """Tensors without their graph, which ask for gradients as before; other objects as they are.

    Raises:
        UsageError: `inputs` is no tuple.
    """
    if not isinstance(inputs, tuple):
        raise UsageError(f"detach_variable: inputs is a {type(inputs).__name__}; pass a tuple")

    def detached(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        moved = one if device is None else one.to(device=device)
        return moved.detach().requires_grad_(one.requires_grad)

    return tuple(detached(one) for one in inputs)


MODEL_PARALLEL = "model-parallel-rng"
OFFSET = 2718  # DeepSpeed's distance between the two seeds, so that runs can be repeated


@final
@methods_raise_theirs
class CudaRNGStatesTracker:
    """States by name; `fork` runs a block with one of them. On a machine without a GPU those of the CPU."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A state that begins with `seed`.

        Raises:
            UsageError: the name or the seed is in use.
        """
        if seed in self.seeds_ or name in self.states_:
            raise UsageError(
                f"add({name!r}, {seed}): the name and the seed must be new; call reset() first"
            )
        before = _state()
        _seed(seed)
        self.states_[name] = _state()
        self.seeds_.add(seed)
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state `name` in the block, and go on with the former state after it.

        Raises:
            UsageError: there is no such state.
        """
        if name not in self.states_:
            raise UsageError(
                f"fork({name!r}): there is no such state; call add({name!r}, seed) first"
            )
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


_tracker = CudaRNGStatesTracker()  # one, as torch has one random number generator of a device


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def seed_model_parallel(seed: int, rank: int) -> None:
    """`seed` for the rank, and a state of its own for each model-parallel rank."""
    _tracker.reset()
    _seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + OFFSET + rank)


def reseed_model_parallel(seed: int, rank: int) -> None:
    """A new seed for the state of each model-parallel rank, which `seed_model_parallel` has added."""
    with _tracker.fork():
        _seed(seed + OFFSET + rank)


def _state() -> Tensor:
    return present().generator.get_state()


def _set_state(state: Tensor) -> None:
    present().generator.set_state(state)


def _seed(seed: int) -> None:
    present().generator.manual_seed(seed)


# argument of configure -> key of the config's section activation_checkpointing
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


@dataclass
class _Settings:
    """What `configure` was last called with."""

    is_configured: bool = False
    mpu: Any = None
    in_cpu: bool = False


_settings = _Settings()  # DeepSpeed's functions have no engine among their arguments


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with its activations recomputed in backward.

    Buffers of modules that the function calls, such as running statistics, are as after one call.
    """
    if _settings.in_cpu:
        warning_once(
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
    section = (
        {}
        if deepspeed_config is None
        else read_source(deepspeed_config)[0].get("activation_checkpointing", {})
    )
    values = {
        name: section.get(key) if given[name] is None else given[name]
        for name, key in _KEYS.items()
    }
    if values["contiguous_checkpointing"]:
        absent = [name for name in ("partition_activations", "num_checkpoints") if not values[name]]
        if absent:
            raise UsageError(
                f"checkpointing.configure(contiguous_checkpointing=True) needs {' and '.join(absent)} too"
            )
    _settings.is_configured = True
    _settings.mpu = mpu_ if mpu_ is not None else _settings.mpu
    _settings.in_cpu = bool(values["checkpoint_in_cpu"])


def is_configured() -> bool:
    """`configure` was called. `checkpoint` works without."""
    return _settings.is_configured


def reset() -> None:
    """Does nothing: no state is kept between steps."""


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
