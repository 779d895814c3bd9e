"""`deepspeed.runtime.zero.leaf_module_config`: the section leaf_module; xds merges it into `units`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from ....utils.schema.section import Section
from ....zero.config import LeafModules
from ...missing import placeholder
from .config_view import ConfigView

DEFAULT_LEAF_MODULE_CLASSES: list[str] = []  # blocks are units in any case, those of experts too
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(ConfigView):
    """Modules that are one unit each. A single name may stand for a list."""

    section: ClassVar[type[Section]] = LeafModules
    path: ClassVar[str] = "zero_optimization.leaf_module"

    classes: list[str] = Field(default_factory=list)
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)

    def __init__(self, **values: Any) -> None:
        listed = {
            key: [value] if isinstance(value, str) else value for key, value in values.items()
        }
        super().__init__(
            **{
                key: list(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else value
                for key, value in listed.items()
            }
        )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
