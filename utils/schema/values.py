"""Types of the values in a config file, and what each of them must be in words.

The types are pydantic's, strict: text is no number, true is no number. What a message or the documentation says
of a type is derived from its JSON schema, unless the type names it itself as `need`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

LIMIT = 1 << 63  # tensors hold whole numbers below it
SHOWN_CHARS = 60  # how much of a value an error message shows
STRICT = ConfigDict(strict=True)
_ENCODER = json.JSONEncoder(default=repr)


def read_whole(value: object) -> object:
    """8.0 and 5e8 are whole numbers; 2.5 is not, and no number that is beyond a float."""
    try:
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return math.inf
    if isinstance(value, float) and is_number and value.is_integer():
        return int(value)
    return value


def _read_number(value: object) -> object:
    read = read_whole(value)
    if isinstance(read, int) and abs(read) >= LIMIT:
        raise ValueError("must be a whole number below 2 to the power of 63")
    return read


def _round_from(least: int) -> BeforeValidator:
    """Annotation: fractions of elements are rounded. Integrations such as transformers compute them."""

    def read(value: object) -> object:
        read = read_whole(value)
        return round(read) if isinstance(read, float) and least <= read < math.inf else read

    return BeforeValidator(read)


def _fold(value: object) -> object:
    return value.casefold() if isinstance(value, str) else value


def _name_dtype(value: object) -> object:
    return DTYPE_NAMES.get(value.casefold(), value) if isinstance(value, str) else value


def needs(text: str, **bounds: Any) -> Any:
    """Annotation: what a value must be, in words, where its JSON schema cannot say it."""
    return Field(json_schema_extra={"need": text}, **bounds)


def checked(holds: Callable[[Any], bool]) -> AfterValidator:
    """Annotation: the value must pass `holds`, which `needs` of the same type says in words."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return AfterValidator(check)


DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfp16", "torch.bfloat16"), "bf16"),
}
WHOLE = BeforeValidator(_read_number)
ANY_CASE = BeforeValidator(_fold)
TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

Flag = bool
Text = str
Object = dict[str, Any]
Items = Annotated[list[Any], Field()]
Names = Annotated[tuple[str, ...], Field(fail_fast=True), TUPLE]
Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
InsideOne = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0), WHOLE]
Count = Annotated[int, Field(ge=1), WHOLE]
Elements = Annotated[int, needs("a number of elements, at least 0", ge=0), _round_from(0)]
SomeElements = Annotated[int, needs("a number of elements, at least 1", ge=1), _round_from(1)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_name_dtype)]
HalfDtype = Annotated[Literal["bf16", "fp16"], BeforeValidator(_name_dtype)]


class Value:
    """A key outside of the typed sections, of this type. It reads one value."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._kind, config=STRICT)

    @cached_property
    def need(self) -> str:
        """What a value must be; completes "must be ..."."""
        return need_of(self._adapter.json_schema())

    def read(self, value: object) -> Any:
        """The value to use. Raises ValueError with what it must be."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(
                sentence(error.errors(include_input=False), self.need, value)
            ) from None


FLAG, NUMBER, NATURAL, COUNT = Value(Flag), Value(Number), Value(Natural), Value(Count)
OBJECT = Value(Object)


def sentence(errors: list[Any], need: str, value: object) -> str:
    """What a value must be, from pydantic's errors: what a validator of ours says, or else its `need`."""
    own = [str(each["ctx"]["error"]) for each in errors if each["type"] == "value_error"]
    if any(own):
        return next(filter(None, own))
    hint = ""
    if isinstance(value, str) and len(value) <= SHOWN_CHARS:
        plain = value.strip()
        is_flag = plain.lower() in ("true", "false") and "true or false" in need
        if is_flag or ("number" in need and _is_number(plain)):
            hint = f", not text: write {plain.lower() if is_flag else plain} without quotes"
    return f"must be {need}{hint}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def need_of(schema: Mapping[str, Any]) -> str:
    """What a value of this JSON schema must be, in words."""
    if "need" in schema:
        return str(schema["need"])
    if "anyOf" in schema:
        first, *others = map(need_of, schema["anyOf"])
        for each in others:
            first += f", or {each}" if ", at least" in first and each != "null" else f" or {each}"
        return first
    if "enum" in schema or "const" in schema:
        listed = [shown(each) for each in schema.get("enum", [schema.get("const")])]
        return " or ".join([*([", ".join(listed[:-1])] if listed[1:] else []), listed[-1]])
    words = {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "text in double quotes",
        "object": "an object {...}",
        "null": "null",
    }
    kind = schema.get("type", "")
    if kind == "array":
        inner = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        least, most = schema.get("minItems"), schema.get("maxItems")
        count = f" of {least}" if least is not None and least == most else ""
        return f"a list{count} ({need_of(inner)})" if inner else "a list [...]"
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    return words.get(kind, "any value") + (f", {' and '.join(bounds)}" if bounds else "")


def shown(value: object) -> str:
    """The value as written in the JSON, cut to one short line."""
    text = ""
    try:
        # encode no more than is shown: a value may be millions of characters long
        for part in _ENCODER.iterencode(value[:SHOWN_CHARS] if isinstance(value, str) else value):
            text += part[: SHOWN_CHARS + 1]
            if len(text) > SHOWN_CHARS:
                break
    except Exception:  # whatever the `repr` of an object from Python raises
        text = f"a Python {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
