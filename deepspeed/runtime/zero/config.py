"""`deepspeed.runtime.zero.config`: the section zero_optimization with DeepSpeed's attributes and defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

from pydantic import Field

from ....utils.errors import ConfigError
from ....utils.schema.section import Section
from ....zero.config import ZeroConfig
from ...errors import in_their_form
from ...missing import placeholder
from .config_view import ConfigView
from .leaf_module_config import DeepSpeedZeroLeafModuleConfig as DeepSpeedZeroLeafModuleConfig
from .offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from .offload_config import DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from .offload_config import OffloadDeviceEnum as OffloadDeviceEnum

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """The stages; each shards also what the one before it shards."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(ConfigView):
    """The section zero_optimization as a DeepSpeed script reads it.

    The values are those that were given, and DeepSpeed's defaults. xds itself reads its own defaults, and
    docs/config.md says which keys have no effect.
    """

    section: ClassVar[type[Section]] = ZeroConfig
    path: ClassVar[str] = ZERO_OPTIMIZATION

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    sub_group_size: int = 1_000_000_000
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(
        default_factory=DeepSpeedZeroLeafModuleConfig
    )

    @classmethod
    def translated(cls, values: dict[str, Any]) -> dict[str, Any]:
        stage = values.get("stage", 0)
        made = {"overlap_comm": stage == ZeroStageEnum.weights, **values}
        if made["overlap_comm"] is None:
            made["overlap_comm"] = stage == ZeroStageEnum.weights
        if "gather_fp16_weights_on_model_save" in made:
            old = made.pop("gather_fp16_weights_on_model_save")
            made["gather_16bit_weights_on_model_save"] = old
        pinned = made.get("cpu_offload_use_pin_memory")
        kinds: dict[str, type[ConfigView]] = {
            "offload_param": DeepSpeedZeroOffloadParamConfig,
            "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
            "leaf_module": DeepSpeedZeroLeafModuleConfig,
        }
        for name, old in (
            ("offload_param", "cpu_offload_param"),
            ("offload_optimizer", "cpu_offload"),
        ):
            if made.get(old):
                pin = {} if pinned is None else {"pin_memory": pinned}
                made[name] = kinds[name](device=OffloadDeviceEnum.cpu, **pin)
        for name, kind in kinds.items():
            if name in made:
                made[name] = kind.of(made[name])
        if made.get("leaf_module") is None:
            made.pop("leaf_module", None)
        return made


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`"zero_optimization": true` is stage 1."""
    is_on = bool(param_dict[ZERO_OPTIMIZATION])
    size = {"allgather_bucket_size": int(param_dict.get("allgather_size", 5e8))} if is_on else {}
    return {"stage": int(is_on), **size}


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The view of a whole config's section.

    Raises:
        ConfigError: the section is wrong.
    """
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    if isinstance(section, bool):
        section = read_zero_config_deprecated(param_dict)
    if not isinstance(section, Mapping):
        with in_their_form():
            raise ConfigError([f"{ZERO_OPTIMIZATION} = {section!r}: must be an object {{...}}"])
    return DeepSpeedZeroConfig(**section)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
