"""Lets the models of transformers mask the samples of packed rows from each other.

    forward of the engine ── inside `samples_apart` ──> model ──> table of masks ──> mask & same sample

transformers finds the samples itself only where a model hands `position_ids` to its mask, has no cache and gets
no `attention_mask`. The functions in its table of masks build the masks of all models, so they are wrapped. Out
of `samples_apart` the wrapped functions do what they did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

Build = Callable[..., Any]
WRAPPED = "xds_wrapped"  # attribute of a function in the table: what it calls
_samples: ContextVar[Tensor | None] = ContextVar("the samples of packed rows", default=None)


def sample_numbers(positions: Tensor) -> Tensor:
    """The number of each token's sample in its row, [B, N]; a sample begins where positions do not go on.

    >>> sample_numbers(torch.tensor([[0, 1, 2, 0, 1]]))
    tensor([[0, 0, 0, 1, 1]])
    """
    begins = positions.diff(dim=1) != 1
    return nn.functional.pad(begins.cumsum(1), (1, 0))


@contextmanager
def samples_apart(samples: Tensor) -> Iterator[None]:
    """Inside, masks of self-attention are those of separate samples. samples: [B or 1, N], their numbers."""
    token = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(token)


def wrap_masks() -> None:
    """Wrap the functions in transformers' table of masks. A second call does nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as TABLE

    for name, build in list(TABLE.items()):
        if not hasattr(build, WRAPPED):
            TABLE[name] = _wrapped(build)


def _wrapped(build: Build) -> Build:
    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        samples = _samples.get()
        if samples is not None and not args and _is_of_row(samples, kwargs):
            kwargs = _within_samples(samples, kwargs)
        return build(*args, **kwargs)

    setattr(built, WRAPPED, build)
    return built


def _is_of_row(samples: Tensor, mask: dict[str, Any]) -> bool:
    """The arguments describe a mask of whole rows, not of a sequence rank's tokens or of a cache's."""
    size, length = samples.shape
    offsets = (mask.get("q_offset", 0), mask.get("kv_offset", 0))
    return (
        mask.get("q_length") == mask.get("kv_length") == length
        and size in (1, mask.get("batch_size"))
        and all(isinstance(offset, int) and offset == 0 for offset in offsets)
        and mask.get("mask_function") is not None
    )


def _within_samples(samples: Tensor, mask: dict[str, Any]) -> dict[str, Any]:
    from transformers.masking_utils import and_masks, packed_sequence_mask_function

    of_rows = samples.expand(mask["batch_size"], -1)
    within = and_masks(mask["mask_function"], packed_sequence_mask_function(of_rows))
    found = mask | {"mask_function": within}
    # a mask that is left out would be the plain causal one, or none
    return found | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


__all__ = ["sample_numbers", "samples_apart", "wrap_masks"]
