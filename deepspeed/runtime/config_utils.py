"""`deepspeed.runtime.config_utils`: the pydantic base of DeepSpeed's config sections, and readers of keys.

    class Section(DeepSpeedConfigModel):
        size: int = 1
        old_size: str = Field("1", json_schema_extra={
            "deprecated": True, "new_param": "size", "new_param_fn": int})

`Section(old_size="4").size` is 4, with a warning in the log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, final

from pydantic import BaseModel, ConfigDict

from ...utils.errors import UsageError
from ..errors import in_their_form
from ..missing import placeholder
from ..utils.logging import logger

_AUTO = "auto"


class DeepSpeedConfigModel(BaseModel):
    """Fields reject unknown names. A value "auto" is left out unless `strict`.

    A field may be marked in `json_schema_extra`: `deprecated`, and then `new_param` (a dotted name of the field
    that replaces it), `new_param_fn` (from the old value to the new), `set_new_param`, `deprecated_msg`.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = data
        if not strict:
            given = {key: value for key, value in data.items() if not _is_auto(key, value)}
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if (
                isinstance(extra, Mapping)
                and extra.get("deprecated")
                and name in self.model_fields_set
            ):
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        """Move the value of a deprecated field to the field that replaces it."""
        path = str(extra.get("new_param") or "")
        more = [f"use {path}"] if path else []
        more += [str(extra["deprecated_msg"])] if extra.get("deprecated_msg") else []
        logger.warning(
            "the config key %s is deprecated%s", name, "".join(f"; {one}" for one in more)
        )
        if not path or not extra.get("set_new_param", True):
            return
        value = extra.get("new_param_fn", _same)(getattr(self, name))
        delattr(self, name)
        *sections, last = path.split(".")
        owner: Any = reduce(getattr, sections, self)
        if last in owner.model_fields_set:
            with in_their_form():
                raise UsageError(
                    f"{name} and {path} are both given, and {path} replaces {name}: give only it"
                )
        setattr(owner, last, value)


def _same(value: Any) -> Any:
    return value


def _is_auto(key: str, value: Any) -> bool:
    return isinstance(value, str) and value == _AUTO and key != "replace_method"


def get_scalar_param(
    param_dict: Mapping[str, Any], param_name: str, param_default_value: Any
) -> Any:
    """The value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_scalar_param
get_dict_param = get_scalar_param


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """The default of a field.

    Raises:
        UsageError: there is no such field, or it must be given.
    """
    field = config.model_fields.get(field_name)
    if field is None or field.is_required():
        with in_their_form():
            raise UsageError(f"{config.__name__} has no field {field_name!r} with a default")
    return field.get_default()


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.load(object_pairs_hook=...)`.

    Raises:
        ValueError: a key is given twice.
    """
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"keys given more than once in the config: {twice}")
    return dict(ordered_pairs)


@final
class ScientificNotationEncoder(json.JSONEncoder):
    """`json.dumps(..., cls=ScientificNotationEncoder)`: numbers above 1000 as 1.000000e+03."""

    def encode(self, o: Any) -> str:
        return super().encode(_scientific(o))

    def iterencode(self, o: Any, _one_shot: bool = False) -> Any:
        return super().iterencode(_scientific(o), _one_shot)


@final
class _Shown(float):
    def __repr__(self) -> str:
        return f"{float(self):e}"


def _scientific(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _scientific(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scientific(one) for one in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _Shown(value) if is_number and value > 1000 else value


class DeepSpeedConfigObject:  # noqa: B903 (scripts derive from it)
    """An object that shows its attributes as JSON."""

    def repr(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(_scientific(self.__dict__), sort_keys=True, indent=4, default=str)


@final
class pp_int(int):  # noqa: N801 (DeepSpeed's name)
    """An int that shows itself with commas, or as `custom_print_str`."""

    custom_print_str: str | None

    def __new__(cls, val: int, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made.custom_print_str = custom_print_str
        return made

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
