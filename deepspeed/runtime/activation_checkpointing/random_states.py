"""Named states of the device's random generator, for regions with random numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ...errors import methods_raise_theirs

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


_tracker = CudaRNGStatesTracker()


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
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


__all__ = [
    "CudaRNGStatesTracker",
    "get_cuda_rng_tracker",
    "reseed_model_parallel",
    "seed_model_parallel",
]
