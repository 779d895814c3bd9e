"""Proves that a model computes packed samples as if each had its row: no logit of a sample depends on another.

    tokens     0 1 2 3 4 | 0 | 0 1 2 3 4 | 0 1        all samples begin with the same tokens: equal logits
    odd        0 1 2 3 4 | x | 0 1 2 3 4 | x x        other tokens in odd samples: those of even ones stay
    even       x x x 3 x | 0 | x x x 3 x | 0 1        and the other way round
    alone      0 1 2 3 4                              without position_ids: a model of transformers has its own

Rows are as long as those of the batch, and each has other boundaries. Other columns follow the tokens.

Token 3 stays: how much its logits move within its own sample says how much a leak would move. Where they do not
move, as those of a head that begins with zeros, a later forward is tried. The last one is tried in any case:
parts that begin with zeros have moved by then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from ...compression.float8.layers import high_precision
from ...ops.device import keeping_draws, wide
from ...ops.torch_internals import tree_leaves
from ...tensor.quiet_runs import evaluating, uncompiled
from ...utils.module_buffers import untouched_buffers
from .inputs import Inputs, PackedInputs
from .masks import sample_numbers

PARTS = 4  # the longest samples of the rows that are made for the proof take a fourth of a row
NUM_PACKED = 3  # forwards with rows of several samples
KEPT = 4  # every 4th token stays
LEAK, LEAK_16_BITS = 1e-3, 0.1  # of what a token of the same sample moves
ELSEWHERE, ELSEWHERE_16_BITS = 1e-2, 0.1  # of the same, for the same tokens at another place
ROUNDING = 8  # units in the last place
VISIBLE = 4  # times the rounding


class Verdict(NamedTuple):
    """What one rank has seen."""

    leaks: bool = False
    differs_by_place: bool = False
    differs_alone: bool = False
    is_proven: bool = False
    is_seen: bool = False  # there was an output with values for each token


@final
@dataclass(eq=False)
class Trial:
    """Some forwards, and what they gave.

    runs: their inputs. positions: [B, N], of the first three. num_alone: tokens of the fourth, if any.
    """

    runs: list[Inputs]
    positions: Tensor
    num_alone: int
    dtype: torch.dtype  # of the forward's computation

    def __post_init__(self) -> None:
        self._outputs: list[Tensor] = []

    @contextmanager
    def observing(self, model: nn.Module) -> Iterator[None]:
        """Inside, forwards of `model` leave no trace in it, and their last output for each token is kept."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        others = random.getstate(), np.random.get_state()
        self._seen: Tensor | None = None
        hooks = [module.register_forward_hook(self._see) for module in model.modules()]
        try:
            with (
                keeping_draws(device),
                evaluating(model),
                high_precision(model),  # the scale of an input is that of all its tokens
                untouched_buffers(model.modules()),
                torch.no_grad(),
                uncompiled(),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            random.setstate(others[0])
            np.random.set_state(others[1])

    def end_run(self) -> None:
        """One forward is over."""
        if self._seen is not None:
            self._outputs.append(self._seen)
        self._seen = None

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        # the outermost module ends last; where its output has no values of tokens, an inner one has
        size, length = self.positions.shape
        length = length if len(self._outputs) < NUM_PACKED else self.num_alone
        found = [by_token(leaf, (size, length)) for leaf in tree_leaves(output)]
        values = [leaf.detach() for leaf in found if leaf is not None]
        if values:
            self._seen = torch.cat([wide(value) for value in values], 2)

    def verdict(self) -> Verdict:
        """What the forwards show on this rank."""
        if len(self._outputs) < len(self.runs):
            return Verdict()
        plain, odd, even = self._outputs[:NUM_PACKED]
        samples = sample_numbers(self.positions)
        is_several = (samples[:, -1:] > 0).expand_as(samples)
        is_odd = samples % 2 == 1
        moves = [(odd, is_odd), (even, ~is_odd)]
        stays = self.positions % KEPT == KEPT - 1
        other, own = Mean(), Mean()
        for output, is_changed in moves:
            moved = (output - plain).abs().mean(2)
            other.add(moved, ~is_changed & is_several)
            own.add(moved, is_changed & stays)
        is_wide = self.dtype.itemsize >= 4
        rounding = torch.finfo(self.dtype).eps * float(plain.abs().mean())
        rounding *= ROUNDING if is_wide else 1
        leaks = other.value > max((LEAK if is_wide else LEAK_16_BITS) * own.value, rounding)
        place = _difference_by_place(plain, samples, self.positions)
        alone = [
            float((output - plain[:, : self.num_alone]).abs().mean())
            for output in self._outputs[NUM_PACKED:]
        ]
        near = max((ELSEWHERE if is_wide else ELSEWHERE_16_BITS) * own.value, 4 * rounding)
        # equal bits beside bits that move prove it as well
        shows = own.value > (VISIBLE * rounding if other.value else 0)
        return Verdict(leaks, place > near, max(alone, default=0.0) > near, shows, is_seen=True)


@dataclass
class Mean:
    """The mean of values at some tokens."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor, at: Tensor) -> None:
        self.total += float(values[at].sum())
        self.count += int(at.sum())

    @property
    def value(self) -> float:
        return self.total / max(1, self.count)


def trial_of(
    found: PackedInputs,
    columns: list[str],
    pad: Any,
    dtype: torch.dtype,
    *,
    has_own_positions: bool,
) -> Trial | None:
    """The forwards for these inputs; None: they have too few tokens, or no two samples in a row.

    Args:
        columns: of the samples.
        pad: the token of padding.
        has_own_positions: the model makes positions where it gets none.
    """
    size, length = found.ids.shape
    is_made = found.is_plain(columns)
    tokens = torch.unique(found.ids)
    tokens = tokens[(tokens != pad) & (tokens >= 0)]
    if len(tokens) < 2 or (is_made and length < 2 * KEPT):
        return None
    if is_made:
        rows_of = [places_of(length, row) for row in range(size)]
        positions = torch.tensor(rows_of, device=found.ids.device)
    else:
        positions = found.positions
        if int(sample_numbers(positions)[:, -1].max()) == 0:
            return None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(tokens), (int(positions.max()) + 1,), generator=generator)
    drawn = drawn.to(tokens.device)
    stays = torch.arange(len(drawn), device=tokens.device) % KEPT == KEPT - 1
    changed = torch.where(stays, drawn, (drawn + 1) % len(tokens))
    both = [tokens[row][positions] for row in (drawn, changed)]
    is_odd = sample_numbers(positions) % 2 == 1
    rows = [both[0], torch.where(is_odd, *both[::-1]), torch.where(is_odd, *both)]
    runs = [
        found.short(positions, ids.to(found.ids.dtype))
        if is_made
        else found.with_ids(ids.to(found.ids.dtype))
        for ids in rows
    ]
    num_alone = longest_of(length) if is_made and has_own_positions else 0
    if num_alone:
        first = rows[0][:, :num_alone].to(found.ids.dtype)
        runs.append(found.without_positions(positions[:, :num_alone], first))
    return Trial(runs, positions, num_alone, dtype)


def longest_of(length: int) -> int:
    """The length of the longest samples of a made row of `length` tokens."""
    return max(KEPT, length // PARTS)


def places_of(length: int, row: int) -> list[int]:
    """The places of the tokens of a made row in their samples.

    The first sample is one of the longest. Others, also of one token, follow in another order in each row.
    """
    longest = longest_of(length)
    others = [1, longest, max(1, longest // 3), longest, 2]
    first = row % len(others)
    lengths = [longest, *others[first:], *others[:first]]
    places = [place for sample in lengths for place in range(sample)][:length]
    return places + list(range(length - len(places)))


def by_token(value: Any, shape: torch.Size | tuple[int, ...]) -> Tensor | None:
    """[B, N, C] of an output with values for each token, in the common layouts; None: it has none."""
    size, length = shape
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    if value.dim() > 2 and tuple(value.shape[:2]) == (size, length):
        return value.flatten(2)
    if value.dim() > 2 and tuple(value.shape[:2]) == (length, size):
        return value.flatten(2).transpose(0, 1)
    if value.shape[0] == size * length:
        return value.reshape(size, length, -1)
    return None


def _difference_by_place(output: Tensor, samples: Tensor, positions: Tensor) -> float:
    """How much samples of a row differ from the first one, which has the same tokens, and as many."""
    found = Mean()
    for row, numbers, places in zip(output, samples, positions, strict=True):
        lengths = numbers.bincount().tolist()
        parts = row.split(lengths)
        begins = places[torch.tensor([0, *lengths[:-1]], device=places.device).cumsum(0)]
        for part, begin in zip(parts[1:], begins[1:].tolist(), strict=True):
            if part.shape == parts[0].shape and begin == int(begins[0]):
                moved = (part - parts[0]).abs().mean(1)
                found.add(moved, torch.ones_like(moved, dtype=torch.bool))
    return found.value


__all__ = ["Trial", "Verdict", "trial_of"]
