"""`deepspeed.comm.config`: the section `comms_logger` of a config, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from ...engine.config.config import Config
from ..missing import placeholder


@final
@dataclass
class CommsLoggerConfig:
    """The section `comms_logger`, with DeepSpeed's defaults."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] | tuple[str, ...] = ()
    verbose: bool = False
    debug: bool = False


@final
class DeepSpeedCommsConfig:
    """The section of a config that is a dict. `comms_logger` is there where the config has the section."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.comms_logger_enabled = "comms_logger" in ds_config
        self.comms_logger = CommsLoggerConfig(**(ds_config.get("comms_logger") or {}))


def comms_config_of(config: Any) -> Any:
    """What `CommsLogger.configure` takes, of a dict, a `Config`, or DeepSpeed's config object."""
    if hasattr(config, "comms_config"):
        return config.comms_config
    if isinstance(config, Config):
        given = "comms_logger" in config.model_fields_set
        return DeepSpeedCommsConfig(
            {"comms_logger": config.comms_logger.as_dict()} if given else {}
        )
    return DeepSpeedCommsConfig(config)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
