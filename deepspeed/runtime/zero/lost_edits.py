"""Edits inside `GatheredParameters` without a modifier_rank: dropped with a warning, as DeepSpeed drops them.

Adapters of PEFT are merged and taken out again there. With `enable_sanity_checks` it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final
from weakref import WeakSet

from torch import nn

from ....engine.config.config import Config
from ....engine.config.text import read_source
from ....utils.errors import UsageError
from ....zero.access.gathered import LostEdit
from ....zero.access.owners import Owner, find_owner
from ...utils.logging import logger

_strict: WeakSet[Owner] = WeakSet()


@final
class InPlaceModification(UsageError, RuntimeError):
    """The error of `enable_sanity_checks`; DeepSpeed's is a RuntimeError."""


def refuse_edits(source: Any, owners: Iterable[Owner | None]) -> None:
    """From now on such edits of the parameters of `owners` are errors, if the config `source` says so."""
    if source is None or isinstance(source, Config):
        return
    data = source if isinstance(source, Mapping) else read_source(source)[0]
    section = data.get("zero_optimization") if isinstance(data, Mapping) else None
    if isinstance(section, Mapping) and section.get("enable_sanity_checks") is True:
        _strict.update(owner for owner in owners if owner is not None)


def drop_or_refuse(error: LostEdit, params: Iterable[Any]) -> None:
    """Warn of the edit that `error` describes. The parameters already have their values of before.

    Raises:
        InPlaceModification: their config has enable_sanity_checks.
    """
    owners = [find_owner(param) for param in params if isinstance(param, nn.Parameter)]
    if any(owner in _strict for owner in owners if owner is not None):
        raise InPlaceModification(f"in-place modification: {error}") from error
    logger.warning("%s", error)


__all__ = ["InPlaceModification", "drop_or_refuse", "refuse_edits"]
