"""`deepspeed.runtime.zero.offload_config`: the offload sections with DeepSpeed's attributes and defaults."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ....offload.config import OffloadOptimizer, OffloadParam
from ....utils.schema.section import Section
from ...missing import placeholder
from .config_view import ConfigView


class OffloadDeviceEnum(str, Enum):
    """Where states are stored."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What `engine.offload_states(include=...)` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(ConfigView):
    """The section offload_param. `buffer_count` and `buffer_size` have no effect in xds."""

    section: ClassVar[type[Section]] = OffloadParam
    path: ClassVar[str] = "zero_optimization.offload_param"

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(ConfigView):
    """The section offload_optimizer. Buffers and pipelining have no effect in xds: copies always overlap."""

    section: ClassVar[type[Section]] = OffloadOptimizer
    path: ClassVar[str] = "zero_optimization.offload_optimizer"

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float | str = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    @property
    def pipeline(self) -> bool:
        return self.pipeline_read or self.pipeline_write


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
