"""The values of a checkpoint that are no elements of flats: what types they have, what tensors they name.

The engine's state (counters, loss scale, optimizer, ...) and what is a rank's own (random generators, ...), as
JSON of `packing`. A tensor in them is a `Named` until it is read from its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, InstanceOf, TypeAdapter, ValidationError

from ...utils.schema.checked_types import Flag, Positive, Size, Text
from .io.tensor_table import shown
from .packing import unpack

Whole = Annotated[int, Field(strict=True)]
ClassName = Annotated[str, Field(strict=True, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True)
class Named:
    """A tensor of the file, by name."""

    name: str


Saved = InstanceOf[Named]


@dataclass(frozen=True)
class Counters:
    """What the engine counts. After how many micro steps it steps; whether it was in between.

    accumulated: how many of them it was behind; older checkpoints do not say.
    """

    global_steps: Size
    micro_steps: Size
    skipped_steps: Size
    global_samples: Size
    accumulation_steps: Positive
    is_accumulating: Flag
    accumulated: Size | None = None


@dataclass(frozen=True)
class ScaleState:
    """See `DynamicScale` in engine/optim/loss_scale.py."""

    value: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
    left: Size
    step: Size
    last_overflow: Annotated[int, Field(strict=True, ge=-1)]


@dataclass(frozen=True)
class OptimizerState:
    """Hyperparameters, group by group."""

    type: ClassName
    groups: list[dict[Any, Any]]


@dataclass(frozen=True)
class SchedulerState:
    """What a scheduler's state_dict() gave."""

    type: ClassName
    state: Any


@dataclass(frozen=True)
class EngineState:
    """All of the manifest's `state`."""

    counters: Counters
    loss_scale: dict[Text, Any]
    optimizer: OptimizerState | None
    lr_scheduler: SchedulerState | None
    data: dict[Text, Size] | None
    client_state: dict[Any, Any]


@dataclass(frozen=True)
class PythonState:
    """Of `random`."""

    version: Whole
    words: Saved
    gauss: Real | None


@dataclass(frozen=True)
class NumpyState:
    """Of numpy's old global generator: position, has_gauss and cached are the rest."""

    name: Text
    words: Saved
    rest: tuple[Whole, Whole, Real]


@dataclass(frozen=True)
class RandomState:
    """See `random_state`."""

    torch: Saved
    python: PythonState
    cuda: Saved | None = None
    numpy: NumpyState | None = None


@dataclass(frozen=True)
class GradState:
    """Sums of a flat that no reduction has taken, and of which slots."""

    local: Saved
    filled: list[Flag]


@dataclass(frozen=True)
class OwnValues:
    """What is a rank's own; all of it is missing in an import."""

    random: RandomState | None = None
    buffers: dict[Text, Saved] = field(default_factory=dict)
    grads: dict[Text, GradState] = field(default_factory=dict)

    @classmethod
    def of(cls, packed: Any) -> OwnValues:
        """The values that `packed` holds. Raises ValueError: it does not hold such."""
        _check_plain(packed, "own")
        found: OwnValues = _read(_OWN, unpack(packed, Named), "own")
        return found


_STATE, _SCALE, _OWN = TypeAdapter(EngineState), TypeAdapter(ScaleState), TypeAdapter(OwnValues)


def state_of(packed: Any) -> EngineState:
    """The engine's state that `packed` holds. Raises ValueError: it does not hold one."""
    _check_plain(packed, "state")
    for key in ("counters", "optimizer"):
        if packed.get(key) is not None:
            _check_plain(packed[key], f"state.{key}")
    state: EngineState = _read(_STATE, unpack(packed, Named), "state")
    if state.loss_scale:  # {}: no scale that changes
        _read(_SCALE, state.loss_scale, "state.loss_scale")
    for group in state.optimizer.groups if state.optimizer is not None else ():
        if "params" in group:
            raise ValueError("state.optimizer.groups have params, which are no hyperparameter")
    return state


def _check_plain(packed: Any, where: str) -> None:
    """Its keys are text as they stand there: who reads one value of it need not unpack all."""
    if not isinstance(packed, dict) or any(key.startswith("$") for key in packed):
        raise ValueError(f"{where} is {shown(packed)}, and not a table of values")


def _read(reader: TypeAdapter[Any], value: Any, where: str) -> Any:
    try:
        return reader.validate_python(value)
    except ValidationError as error:
        raise ValueError(complaint(error, where)) from None


def complaint(error: ValidationError, where: str = "") -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    places = [f"[{one}]" if isinstance(one, int) else f".{one}" for one in first["loc"]]
    place = (where + "".join(places)).lstrip(".") or "it"
    reason = first["msg"][:1].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f", and is {shown(first['input'])}"
    return f"{shown(place)[1:-1]}: {reason}{given}"


def names_in(packed: Any) -> Iterator[str]:
    """Every tensor that a packed value names."""
    found: list[str] = []
    unpack(packed, found.append)
    return iter(found)
