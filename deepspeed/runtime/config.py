"""`deepspeed.runtime.config`: the error that a config raises."""

from __future__ import annotations

from typing import Any

from ...utils.errors import ConfigError
from ..missing import stand_in

DeepSpeedConfigError = ConfigError


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
