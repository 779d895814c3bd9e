"""DeepSpeed's methods and attributes of an engine that return values of its config."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.precision import compute_dtype
from ..config import DeepSpeedConfig
from ..library.log import set_log_level_from_string

# name of the method -> path of the key in the checked config; None where the section is absent
_CHECKED: dict[str, str] = {
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric": "autotuning.metric",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "bfloat16_enabled": "bf16.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "loss_scale": "fp16.loss_scale",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_params": "optimizer.params",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_gamma": "progressive_layer_drop.gamma",
    "pld_theta": "progressive_layer_drop.theta",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.max_reuse_distance",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
}

# name of the method -> path of an attribute of `_config`: the value that was given, or DeepSpeed's default
_GIVEN: dict[str, str] = {
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "dynamic_loss_scale_args": "dynamic_loss_scale_args",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "torch_autocast_dtype": "torch_autocast_dtype",
    "use_node_local_storage": "use_node_local_storage",
    "zero_allgather_bucket_size": "zero_config.allgather_bucket_size",
    "zero_allgather_partitions": "zero_config.allgather_partitions",
    "zero_elastic_checkpoint": "zero_config.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": "zero_config.ignore_unused_parameters",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    "zero_reduce_bucket_size": "zero_config.reduce_bucket_size",
    "zero_round_robin_gradients": "zero_config.round_robin_gradients",
    "zero_sub_group_size": "zero_config.sub_group_size",
}

# name of the method -> its answer: xds has no such choice, or refuses the feature
_ANSWERS: dict[str, Any] = {
    "amp_enabled": False,
    "eigenvalue_enabled": False,
    "is_deepcompile_enabled": False,
    "sparse_gradients_enabled": False,
    "zero_contiguous_gradients": True,
    "zero_load_from_fp32_weights": True,
    "zero_reduce_scatter": True,
}

# name of the attribute -> its value, until the script sets it
_ATTRIBUTES: dict[str, Any] = {
    "enable_backward_allreduce": True,
    "gradient_average": True,
    "losses": None,
}

_BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


class Values:
    """Part of `DeepSpeedEngine`."""

    _engine: Any
    module: Any
    get_batch_info: Any
    zero_optimization_stage: Any

    @property
    def _config(self) -> DeepSpeedConfig:
        """The config with DeepSpeed's attributes and defaults, for reading."""
        kept: DeepSpeedConfig | None = self.__dict__.get("_read_config")
        if kept is None:
            engine, given = self.__dict__["_engine"], getattr(self, "config")  # noqa: B009 (of the engine)
            ranks = SimpleNamespace(get_data_parallel_world_size=lambda: engine.dp_world_size)
            sizes = dict(zip(_BATCH_SIZES, self.get_batch_info(), strict=True))
            kept = DeepSpeedConfig({**given, **sizes}, mpu=ranks)
            kept.gradient_clipping = engine.config.gradient_clipping
            self.__dict__["_read_config"] = kept
        return kept

    def _value(self, name: str) -> Any:
        """What the tables have for a name; KeyError if they have nothing."""
        if name in _ATTRIBUTES:
            return copy.copy(_ATTRIBUTES[name])
        if name in _ANSWERS:
            return partial(copy.copy, _ANSWERS[name])
        if name in _CHECKED:
            return partial(_at, self._engine.config, _CHECKED[name])
        return partial(_at, self._config, _GIVEN[name])

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: they are not clipped."""
        return float(self._engine.config.gradient_clipping)

    def log_level(self) -> str | None:
        """The level of DeepSpeed's logger in the config."""
        level: str | None = self._config.log_level
        return level

    def _follow_config(self) -> None:
        """Set the level of DeepSpeed's logger, where the config has one."""
        level = self.log_level()
        if level is not None:
            set_log_level_from_string(level)

    def optimizer_name(self) -> str | None:
        """The config's optimizer, DeepSpeed's own in lower case; else the class of the one that was passed."""
        name: str | None = self._config.optimizer_name
        given = self._engine.optimizer
        return type(given).__name__ if name is None and given is not None else name

    def get_pld_theta(self) -> float | None:
        """theta of the next training forward; None without progressive layer drop."""
        if not self._engine.config.progressive_layer_drop.enabled:
            return None
        theta: float = self._engine.get_pld_theta()
        return theta

    @property
    def progressive_layer_drop(self) -> Any:
        """An object with DeepSpeed's methods, at the present step; None without progressive layer drop."""
        section = self._engine.config.progressive_layer_drop
        if not section.enabled:
            return None
        from ..library.dropping import ProgressiveLayerDrop

        found = ProgressiveLayerDrop(section.theta, section.gamma)
        if self._engine.global_steps:
            found.update_state(self._engine.global_steps)
        return found

    @property
    def curriculum_scheduler_legacy(self) -> Any:
        if not self._engine.config.curriculum_learning.enabled:
            raise AttributeError  # the message is that of `refuse_method`
        from ..library.dropping import LegacyCurriculum

        return LegacyCurriculum(self._engine)

    @property
    def random_ltd_scheduler(self) -> Any:
        self._needs_random_ltd()
        from ..library.dropping import RandomLTDScheduler

        return RandomLTDScheduler(self._engine.token_dropping, self._engine.train_batch_size())

    @property
    def random_ltd_initialize(self) -> Any:
        """A method without effect: `convert_to_random_ltd` has done it, or the first forward does."""
        self._needs_random_ltd()
        return partial(_nothing)

    def _needs_random_ltd(self) -> None:
        if not self._engine.config.data_efficiency.drops_tokens:
            raise AttributeError  # the message is that of `refuse_method`

    def pld_params(self) -> dict[str, float] | bool:
        """theta and gamma of the config; False without the section."""
        section = self._engine.config.progressive_layer_drop
        return {"theta": section.theta, "gamma": section.gamma} if section.enabled else False

    def curriculum_params_legacy(self) -> dict[str, Any] | bool:
        """The section curriculum_learning without `enabled`; False where it is off."""
        values: dict[str, Any] = self._engine.config.curriculum_learning.as_dict()
        return values if values.pop("enabled") else False

    def zero_cpu_offload(self) -> bool:
        return self.zero_offload_optimizer() is not None

    def zero_use_cpu_optimizer(self) -> bool:
        return self.zero_offload_optimizer() is not None

    def zero_offload_optimizer(self) -> Any:
        """The section; None where it offloads nothing."""
        section = self._engine.config.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> Any:
        section = self._engine.config.zero_optimization.offload_param
        return None if section.device == "none" else section

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    @property
    def communication_data_type(self) -> torch.dtype:
        """The config's dtype of collectives; else the dtype of parameters, as in DeepSpeed."""
        given: torch.dtype | None = self._config.communication_data_type
        return given or compute_dtype(self._engine.config) or torch.float32

    @property
    def dist_backend(self) -> str | None:
        return str(dist.get_backend()) if dist.is_initialized() else None

    @property
    def pipeline_parallelism(self) -> bool:
        return "grid" in self.__dict__

    @property
    def inside_no_sync_ctxt(self) -> bool:
        return bool(self._engine.internals.in_no_sync)

    @property
    def collate_fn(self) -> Any:
        return self.__dict__["_collate_fn"]

    @property
    def has_moe_layers(self) -> bool:
        return bool(self.moe_layers)

    @property
    def moe_layers(self) -> list[Any]:
        """The modules `MoE` of the model."""
        from ..library.moe import MoE

        return [one for one in self.module.modules() if isinstance(one, MoE)]

    @property
    def num_experts(self) -> list[int]:
        """Of each `MoE`."""
        return [one.num_experts for one in self.moe_layers]

    @property
    def param_names(self) -> dict[Tensor, str]:
        """Parameter -> its name in the model."""
        return {param: name for name, param in self.module.named_parameters()}


def _nothing() -> None:
    return


def _at(config: Any, path: str) -> Any:
    found: Any = config
    for part in path.split("."):
        found = None if found is None else getattr(found, part)
    return found


__all__ = ["Values"]
