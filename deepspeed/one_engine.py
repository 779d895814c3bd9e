"""A second engine of one model: scripts initialize a model again, and go on with the new engine."""

from __future__ import annotations

import weakref
from weakref import ReferenceType, WeakKeyDictionary

from torch import nn

from ..engine.engine import Engine
from .stand_in.unused import note_use
from .utils.logging import logger

_engines: WeakKeyDictionary[nn.Module, ReferenceType[Engine]] = WeakKeyDictionary()


def remember_engine(model: nn.Module, engine: Engine) -> None:
    """`engine` trains `model` from now on, also where the script drops the engine and keeps the model.

    The model holds the engine, as DeepSpeed's hooks do, so that a second engine of the model can end the first.
    """
    _engines[model] = weakref.ref(engine)
    note_use("engine")
    engine._guards.keep_with_model(model, engine)


def end_older_engine(model: nn.Module) -> None:
    """Destroy the engine that this layer made for `model` before; the model keeps its values. A collective.

    An engine owns the parameters, so there can be only one.
    """
    found = _engines.pop(model, None)
    older = None if found is None else found()
    if older is None or older._is_destroyed:
        return
    if older.global_rank == 0:
        logger.warning(
            "deepspeed.initialize: this model had an engine, which is destroyed now; the new one begins "
            "with the model's values, and with an optimizer of its own"
        )
    older.destroy()


__all__ = ["end_older_engine", "remember_engine"]
