"""The base of `DeepSpeedZeroConfig` and its sections: DeepSpeed's attributes and defaults, checked by xds.

    DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=8)
        values that were given ──> the section's own reader (xds.zero.config): complains as xds does
        the same values, under the names without prefix, over DeepSpeed's defaults ──> attributes

A view is read; `initialize` takes a config, not a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from ....utils.errors import ConfigError
from ....utils.schema.keys import Report, is_auto
from ....utils.schema.section import Section, read_section
from ...errors import in_their_form


class ConfigView(BaseModel):
    """Fields are DeepSpeed's attributes; `section` is the section of xds that reads the same keys."""

    model_config = ConfigDict(extra="allow", use_enum_values=False, arbitrary_types_allowed=True)

    section: ClassVar[type[Section]]
    path: ClassVar[str]
    unread: ClassVar[tuple[str, ...]] = ()  # keys for reading alone, which the section refuses

    def __init__(self, **values: Any) -> None:
        """
        Raises:
            ConfigError: every complaint about the values at once; also a ValueError.
        """
        given = {key: value for key, value in values.items() if not is_auto(value)}
        report = Report()
        read = {key: value for key, value in given.items() if key not in self.unread}
        read_section(self.section, _plain(read), self.path, report)
        if report.complaints:
            with in_their_form():
                raise ConfigError(report.complaints, self.path)
        renamed = {self.section.aliases.get(key, key): value for key, value in given.items()}
        super().__init__(**self.translated(renamed))

    @classmethod
    def translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values with what older names stand for."""
        return values

    @classmethod
    def of(cls, value: Any) -> Any:
        """A view of a section of a config; None stays None."""
        if value is None or isinstance(value, cls):
            return value
        return cls(**value)

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or `default` where there is none."""
        return getattr(self, name, default)


def _plain(value: Any) -> Any:
    """Views and enums as JSON values."""
    if isinstance(value, ConfigView):
        return _plain({name: getattr(value, name) for name in value.model_fields_set})
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    inner = getattr(value, "value", value)
    return inner if isinstance(inner, (str, int, float, type(None))) else str(inner)


__all__ = ["ConfigView"]
