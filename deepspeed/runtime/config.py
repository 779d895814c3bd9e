"""`deepspeed.runtime.config`: the exception for an invalid config."""

from __future__ import annotations

from typing import Any

from ...utils.errors import ConfigError
from ..missing import placeholder

DeepSpeedConfigError = ConfigError


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
