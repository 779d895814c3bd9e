"""The schema of a checkpoint's values outside of flat buffers: the engine's state, and each rank's own values.

They are packed as JSON by `packing`. A tensor in them is a `Named` until it is read from its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, InstanceOf, TypeAdapter, ValidationError

from ...ops.weights.tensor_table import shown
from ...utils.schema.checked_types import Flag, Positive, Size, Text
from ..config.sections import SCALES
from ..optim.loss_scale import MAX_SCALE
from .packing import unpack

Whole = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Scale = Annotated[float, Field(strict=True, ge=SCALES[0], le=MAX_SCALE, allow_inf_nan=False)]
ClassName = Annotated[str, Field(strict=True, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


@dataclass(frozen=True)
class Named:
    """A tensor of the file, by name."""

    name: str


Saved = InstanceOf[Named]


@dataclass(frozen=True)
class SavedCounters:
    """accumulation_steps: micro-batches per step. is_accumulating: saved within a step.

    accumulated: micro-batches of that step already processed; older checkpoints do not contain it.
    best_metric, saves_since_best: of the saves before this one.
    """

    global_steps: Size
    micro_steps: Size
    skipped_steps: Size
    global_samples: Size
    accumulation_steps: Positive
    is_accumulating: Flag
    accumulated: Size | None = None
    best_metric: Real | None = None
    saves_since_best: Size = 0


@dataclass(frozen=True)
class ScaleState:
    """See `DynamicScale` in engine/optim/loss_scale.py."""

    value: Scale
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
    """The result of a scheduler's state_dict()."""

    type: ClassName
    state: Any


@dataclass(frozen=True)
class OuterState:
    """groups: how many have saved. weights: the items of this one since the last meeting, by fragment."""

    groups: Positive
    weights: list[Annotated[Real, Field(ge=0)]]


@dataclass(frozen=True)
class SavedEngineState:
    """The manifest's `state`. owed_*: the pending errors, see `PendingError`; older checkpoints have none.

    outer: of groups that train alone.
    """

    counters: SavedCounters
    loss_scale: dict[Text, Any]
    optimizer: OptimizerState | None
    lr_scheduler: SchedulerState | None
    data: dict[Text, Size] | None
    client_state: dict[Any, Any]
    owed_unit: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    owed_steps: Size = 0
    owed_holds_momentum: bool = False
    outer: OuterState | None = None


@dataclass(frozen=True)
class PythonState:
    """The state of Python's `random`."""

    version: Whole
    words: Saved
    gauss: Real | None


@dataclass(frozen=True)
class NumpyState:
    """The state of numpy's global generator. rest: position, has_gauss and the cached value."""

    name: Text
    words: Saved
    rest: tuple[Whole, Whole, Real]


@dataclass(frozen=True)
class RandomState:
    """See `random_state`. devices: by type; xds 0.2 had the field below instead."""

    torch: Saved
    python: PythonState
    devices: dict[Text, Saved] = field(default_factory=dict)
    cuda: Saved | None = None
    numpy: NumpyState | None = None


@dataclass(frozen=True)
class GradState:
    """Gradients of a flat buffer that are not reduced yet, and which slots they fill."""

    local: Saved
    filled: list[Flag]


@dataclass(frozen=True)
class MeansState:
    """The sums of the weights and losses of a step that is not over; see `StepMeans`."""

    weight: Annotated[Real, Field(ge=0)] | None
    loss: Real | None


@dataclass(frozen=True)
class OwnValues:
    """A rank's own values; imports have none."""

    random: RandomState | None = None
    buffers: dict[Text, Saved] = field(default_factory=dict)
    grads: dict[Text, GradState] = field(default_factory=dict)
    means: MeansState | None = None

    @classmethod
    def of(cls, packed: Any) -> OwnValues:
        """The values in `packed`. Raises ValueError: it has another form."""
        values: OwnValues = _read(_OWN, packed, "own")
        return values


_STATE, _SCALE, _OWN = (
    TypeAdapter(SavedEngineState),
    TypeAdapter(ScaleState),
    TypeAdapter(OwnValues),
)


def state_of(packed: Any) -> SavedEngineState:
    """The engine's state in `packed`. Raises ValueError: it has another form."""
    state: SavedEngineState = _read(_STATE, packed, "state", "counters", "optimizer")
    if state.loss_scale:  # {}: the scale is not dynamic
        _read(_SCALE, packed["loss_scale"], "state.loss_scale")
    for group in state.optimizer.groups if state.optimizer is not None else ():
        if "params" in group:
            raise ValueError("state.optimizer.groups have params, which are no hyperparameter")
    return state


def _read(reader: TypeAdapter[Any], packed: Any, where: str, *inner: str) -> Any:
    """`packed` as the reader's type. It, and its values `inner`, are tables that are read without unpacking."""
    for place in ("", *inner):
        table = packed.get(place) if place else packed
        is_plain = isinstance(table, dict) and not any(key.startswith("$") for key in table)
        if not is_plain and not (place and table is None):
            here = f"{where}.{place}".rstrip(".")
            raise ValueError(f"{here} is {shown(table)}, and not a table of values")
    try:
        return reader.validate_python(unpack(packed, Named))
    except ValidationError as error:
        raise ValueError(complaint(error, where)) from None


def complaint(error: ValidationError, where: str = "") -> str:
    """The first error, in one line."""
    first = error.errors(include_url=False)[0]
    places = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]]
    place = (where + "".join(places)).lstrip(".") or "it"
    reason = first["msg"][:1].lower() + first["msg"][1:]
    given = "" if first["type"] == "missing" else f", and is {shown(first['input'])}"
    return f"{shown(place)[1:-1]}: {reason}{given}"


def names_in(packed: Any) -> Iterator[str]:
    """The names of all tensors in a packed value."""
    names: list[str] = []
    unpack(packed, names.append)
    return iter(names)
