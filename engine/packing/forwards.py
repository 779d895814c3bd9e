"""Forwards of packed rows: what the model gets for them, and the proof before the first training forward."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...tensor.sequence.plain_batches import LABELS
from ...utils.errors import UsageError
from ..config.config import Config
from ..parts import Packing
from .inputs import Inputs, Names, find_packed
from .masks import sample_numbers, samples_apart, wrap_masks
from .proof import Trial, Verdict, trial_of

ATTEMPTS = (1, 2, 8, 32)  # training forwards of the first micro-batches of steps
NEVER = 1 << 40  # forwards of a process that is new
CACHE, PAST, POSITIONS = "use_cache", "past_key_values", "position_ids"
log = logging.getLogger("xds")


@final
class PackedForwards(Packing):
    """Keeps the samples of packed rows apart in the forwards of `model`, this rank's part."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        world: Collectives,
        recent: deque[tuple[Tensor, Tensor]],
    ) -> None:
        """recent: tokens and positions of the last micro-batches that the loader has given."""
        self._model, self._world, self._recent = model, world, recent
        self._columns = config.data_packing.columns
        # without labels each sequence rank computes all tokens
        self._drops_labels = config.sequence_parallel_size > 1
        self._gets_positions = True
        self._num_forwards = 0
        self._is_proven = False
        self._is_done = False
        self._was_seen = False
        self._is_of_transformers = any(_attends(module) for module in model.modules())
        self._takes_cache = _takes_cache(model)
        self._names = Names(model)
        if self._is_of_transformers:
            wrap_masks()

    # -- what the model gets ----------------------------------------------------------------------------

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Without a cache: with one, transformers does not look for samples."""
        found = dict(kwargs)
        if POSITIONS in found and not self._names.takes(POSITIONS):
            raise UsageError(
                f"data_packing: the forward of {type(self._model).__name__} takes no position_ids, so it "
                "cannot tell the samples of a row apart; give it that argument, or remove data_packing"
            )
        if (
            self._takes_cache
            and found.get(CACHE) is None
            and self._positions(args, found) is not None
        ):
            found[CACHE] = False
        return found

    @contextmanager
    def apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        positions = self._positions(args, kwargs) if self._is_of_transformers else None
        if positions is None:
            yield
            return
        with samples_apart(sample_numbers(positions)):
            yield

    def _positions(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Those of whole rows, [B, N]; None: there are none, or they are those of a generation."""
        given = self._names.named(args, kwargs)
        positions = given.get(POSITIONS)
        is_generation = given.get(PAST) is not None or bool(given.get(CACHE))
        is_of_rows = isinstance(positions, Tensor) and positions.dim() == 2
        return positions if is_of_rows and not is_generation else None

    # -- the proof --------------------------------------------------------------------------------------

    def trial(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial | None:
        if self._is_done or not torch.is_grad_enabled():
            return None
        due = ATTEMPTS[-1:] if self._is_proven else ATTEMPTS
        if self._num_forwards + 1 not in due:
            self._num_forwards += 1
            return None
        found = self._trial(args, kwargs)
        mine = torch.tensor([found is not None], dtype=torch.int64, device=self._world.device)
        everywhere = bool(self._world.gather_small(mine, what="packed rows for a proof").all())
        if not everywhere:
            self._end_attempt()
        return found if everywhere else None

    def _trial(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial | None:
        column = next(iter(self._columns))
        found = find_packed(self._names, (args, dict(kwargs)), self._recent, column)
        if found is None:
            return None
        trial = trial_of(
            found,
            list(self._columns),
            self._columns[column],
            _computed_in(self._model),
            has_own_positions=self._is_of_transformers and found.has_named_positions,
        )
        self._gets_positions = found.gets_positions
        if trial is not None and self._drops_labels:
            trial.runs = [_without_labels(run) for run in trial.runs]
        return trial

    def judge(self, trial: Trial) -> None:
        mine = torch.tensor(trial.verdict(), dtype=torch.int64, device=self._world.device)
        table = self._world.gather_small(mine, what="the proof of packed rows")
        found = Verdict(*table.any(0).tolist())
        if found.leaks or found.differs_by_place or found.differs_alone:
            name = type(self._model).__name__
            raise UsageError(f"data_packing: {name} {self._problem(found)}remove data_packing")
        self._was_seen = self._was_seen or found.is_seen
        self._is_proven = self._is_proven or found.is_proven
        self._end_attempt()

    def _end_attempt(self) -> None:
        self._num_forwards += 1
        if self._num_forwards < ATTEMPTS[-1]:
            return
        self._end()
        if self._is_proven:
            return
        reason = (
            "none of its tokens depends on another one"
            if self._was_seen
            else "it has not got tokens and positions of the engine's loader, or has no output for each token"
        )
        if self._world.rank == 0:
            name = type(self._model).__name__
            log.warning(
                "data_packing: no proof that %s keeps the samples of a row apart: %s", name, reason
            )

    def _end(self) -> None:
        self._is_done = True
        self._recent.clear()

    def rejoin(self, *, is_new: bool) -> None:
        number = NEVER if is_new else self._num_forwards
        mine = [number, self._is_done, self._is_proven, self._was_seen]
        own = torch.tensor(mine, dtype=torch.int64, device=self._world.device)
        table = self._world.gather_small(own, what="proofs of packed rows")
        # a rank that has ended an attempt makes it again with those that have not
        fewest = int(table[:, 0].min())
        self._num_forwards = 0 if fewest == NEVER else fewest
        is_done, self._is_proven, self._was_seen = table[:, 1:].any(0).tolist()
        if is_done:
            self._end()

    def _problem(self, found: Verdict) -> str:
        """What the model does, and what else than no packing would change that."""
        if found.leaks:
            text = "lets tokens see other samples of their row"
            changes = "mask by position_ids or cu_seqlens of the batch"
            if self._is_of_transformers:
                changes = 'build it with attn_implementation = "sdpa" if it has that'
        elif found.differs_by_place:
            text = "does not let its positions restart at each sample of a row"
            changes = "" if self._is_of_transformers else "let it use position_ids of the batch"
        else:
            text, changes = (
                "has positions that do not begin at 0, as those of packed samples do",
                "",
            )
        if not self._gets_positions:
            changes = "pass it position_ids of the batch, and let it use them"
        return f"{text}; {changes}, or " if changes else f"{text}; "


def _attends(module: nn.Module) -> bool:
    """It is a model of transformers."""
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return isinstance(chosen, str)


def _takes_cache(model: nn.Module) -> bool:
    """The forward has the argument `use_cache`, or hands it to a model of transformers that has it."""
    params = inspect.signature(model.forward).parameters
    if CACHE in params:
        return True
    hands_down = any(param.kind is param.VAR_KEYWORD for param in params.values())
    return hands_down and any(
        CACHE in inspect.signature(module.forward).parameters
        for module in model.modules()
        if _attends(module)
    )


def _computed_in(model: nn.Module) -> torch.dtype:
    """The narrowest dtype of the computation."""
    dtypes = [param.dtype for param in model.parameters() if param.is_floating_point()]
    device = next((param.device.type for param in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    wide = [dtype for dtype in dtypes if dtype.itemsize >= 2]
    return min(wide, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _without_labels(inputs: Inputs) -> Inputs:
    args, kwargs = inputs
    return args, {key: value for key, value in kwargs.items() if key not in LABELS}


__all__ = ["PackedForwards"]
