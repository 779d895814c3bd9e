"""DeepSpeed's names of an engine that are read from its config as DeepSpeed reads it, `engine._config`.

Methods are in a table of attribute paths and a table of fixed answers; attributes are in a third table.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .config import DeepSpeedConfig

# name of the method -> path of an attribute of `_config`
PATHS: dict[str, str] = {
    "bf16_master_weights_and_gradients": "bfloat16_config.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bfloat16_config.bf16_optimizer_states",
    "checkpoint_tag_validation_enabled": "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail": "checkpoint_tag_validation_fail",
    "dynamic_loss_scale_args": "dynamic_loss_scale_args",
    "fp16_master_weights_and_gradients": "float16_config.fp16_master_weights_and_grads",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "is_sanity_checks_enabled": "zero_config.enable_sanity_checks",
    "optimizer_legacy_fusion": "optimizer_legacy_fusion",
    "torch_autocast_dtype": "torch_autocast_dtype",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_hpz_partition_size": "zero_config.zero_hpz_partition_size",
    "zero_multi_rank_bucket_allreduce": "zero_config.use_multi_rank_bucket_allreduce",
    "zero_quantized_gradients": "zero_config.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_config.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_config.zero_quantized_weights",
    **{
        f"zero_{name}": f"zero_config.{name}"
        for name in (
            *("allgather_bucket_size", "allgather_partitions", "allgather_sequential"),
            "ignore_unused_parameters",
            *(
                "compute_grad_norm",
                "elastic_checkpoint",
                "legacy_stage1",
                "log_trace_cache_warnings",
            ),
            *("model_persistence_threshold", "module_granularity_threshold", "parameter_alignment"),
            *("reduce_bucket_size", "round_robin_gradients", "sub_group_size"),
            "save_muon_momentum_buffer_in_memory",
        )
    },
}

_CURRICULUM = {"enabled": False}
_RANDOM_LTD = {"enabled": False, "layer_token_lr_schedule": {"enabled": False}}
_DYNAMIC_BATCHING = {
    "enabled": False,
    "lr_scaling_method": "linear",
    "min_batch_size": 1,
    "max_batch_size": None,
    "sequence_picking_order": "dataloader",
    "verbose": False,
}
_SAMPLING = {
    "enabled": False,
    "num_epochs": 1000,
    "num_workers": 0,
    "pin_memory": False,
    "curriculum_learning": _CURRICULUM,
    "dynamic_batching": _DYNAMIC_BATCHING,
}
_AIO = {
    "block_size": 1048576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
_AUTOCAST = ["linear.Linear", "conv.Conv1d", "conv.Conv2d", "conv.Conv3d"]

# name of the method -> its answer: the config refuses the feature, or xds has no such choice
ANSWERS: dict[str, Any] = {
    "autotuning_end_profile_step": 5,
    "autotuning_metric": "throughput",
    "autotuning_profile_model_info": False,
    "autotuning_start_profile_step": 3,
    "checkpoint_serialization_enabled": True,
    "checkpoint_writer_enabled": False,
    "compile_autosp": False,
    "compile_autotp": False,
    "compile_zero_optimization_stage": False,
    "curriculum_learning_config": _CURRICULUM,
    "data_efficiency_config": {
        "enabled": False,
        "seed": 1234,
        "data_sampling": _SAMPLING,
        "data_routing": {"enabled": False, "random_ltd": _RANDOM_LTD},
    },
    "data_sampling_config": _SAMPLING,
    "data_sampling_enabled": False,
    "get_compile_time": [],
    "is_deepcompile_active": False,
    "is_deepcompile_enabled": False,
    "random_ltd_config": _RANDOM_LTD,
    "uses_parallelization_pass_only": False,
    "zero_nvme_offload_optimizer": False,
}

# name of the attribute -> its value, until the script sets it
ATTRIBUTES: dict[str, Any] = {
    "all_to_all_group": None,
    "checkpoint_mp_rank": 0,
    "dont_change_device": False,
    "enable_backward_allreduce": True,
    "expert_data_parallel_group": {},
    "expert_parallel_group": {},
    "gate_modules": [],
    "gradient_average": True,
    "has_moe_layers": False,
    "local_all_to_all_group": None,
    "losses": None,
    "mesh_device": None,
    "moe_layers": [],
    "num_experts": [],
    "optimized_linear_base_weight_sharding": False,
    "optimized_linear_lora_enabled": False,
    "scale_wrt_gas": None,
    "torch_autocast_z0_gradscaler": None,
    "use_ds_comm": False,
    "warn_unscaled_loss": True,
}


class Getters:
    """Part of `DeepSpeedEngine`. The names of the tables are added to it below."""

    _engine: Any
    module: Any
    seq_parallel_group: Any
    zero_optimization_stage: Any

    @property
    def _config(self) -> DeepSpeedConfig:
        raise NotImplementedError

    # -- the optimizer ----------------------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """The config's optimizer, DeepSpeed's own in lower case; else the class of the one that was passed."""
        name: str | None = self._config.optimizer_name
        given = self._engine.optimizer
        return type(given).__name__ if name is None and given is not None else name

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer's states are offloaded."""
        section = self._config.zero_config.offload_optimizer
        return section is not None and section.device in ("cpu", "nvme")

    def zero_partial_offload(self) -> float:
        return float(self._of_offload("ratio", 1.0))

    def super_offload(self) -> bool:
        return bool(self._of_offload("super_offload", False))

    def cpuadam_cores_perc(self) -> float:
        return float(self._of_offload("cpuadam_cores_perc", 0.9))

    def _of_offload(self, name: str, default: Any) -> Any:
        return getattr(self._config.zero_config.offload_optimizer, name, default)

    # -- values that are worked out -----------------------------------------------------------------------

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def aio_config(self) -> dict[str, Any]:
        """The section aio over DeepSpeed's defaults."""
        return {**_AIO, **self._section("aio")}

    def autotp_size(self) -> int:
        return int(self._section("tensor_parallel").get("autotp_size", 0))

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Full names of the classes that run in the lower precision."""
        named = self._section("torch_autocast").get("lower_precision_safe_modules")
        return [f"torch.nn.modules.{one}" for one in _AUTOCAST] if named is None else list(named)

    def autotuning_metric_path(self) -> str:
        return os.path.join(os.getcwd(), "autotuning_metric.json")

    def autotuning_model_info_path(self) -> str:
        return os.path.join(os.getcwd(), "autotuning_model_info.json")

    def _section(self, name: str) -> dict[str, Any]:
        given = self._config._param_dict.get(name)
        return given if isinstance(given, dict) else {}

    @property
    def communication_data_type(self) -> torch.dtype:
        """The config's dtype of collectives; else the dtype of parameters, as in DeepSpeed."""
        config = self._config
        given: torch.dtype | None = config.communication_data_type
        if given is not None:
            return given
        if config.fp16_enabled:
            return torch.float16
        return torch.bfloat16 if config.bfloat16_enabled else torch.float32

    # -- places of ranks ----------------------------------------------------------------------------------

    @property
    def dist_backend(self) -> str | None:
        return str(dist.get_backend()) if dist.is_initialized() else None

    @property
    def pipeline_parallelism(self) -> bool:
        return "grid" in self.__dict__

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    @property
    def sequence_parallel_size(self) -> int:
        return int(self._groups._get_sequence_parallel_world_size())

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self._groups._get_sequence_data_parallel_group()
        return found

    @property
    def seq_dp_world_size(self) -> int:
        return int(self._groups._get_sequence_data_parallel_world_size())

    @property
    def _groups(self) -> Any:
        from ..utils import groups  # not above: it imports this folder

        return groups

    # -- state --------------------------------------------------------------------------------------------

    @property
    def inside_no_sync_ctxt(self) -> bool:
        return bool(self._engine._accumulation.in_no_sync)

    @property
    def collate_fn(self) -> Any:
        return self.__dict__["_collate_fn"]

    @property
    def param_names(self) -> dict[Tensor, str]:
        """Parameter -> its name in the model."""
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def save_non_zero_checkpoint(self) -> bool:
        return bool(self.zero_optimization_stage() == 3 or self._engine.dp_rank == 0)

    @property
    def save_zero_checkpoint(self) -> bool:
        return bool(self.zero_optimization_stage())

    # -- functions ----------------------------------------------------------------------------------------

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    @staticmethod
    def collect_python_gc() -> int:
        """Collect Python's unreachable objects; returns how many."""
        return gc.collect()

    @staticmethod
    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        """One tensor, [sum of elements]."""
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat

    @staticmethod
    def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Parts of `flat` in the shapes of `tensors`."""
        parts: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
        return parts


@final
class _Attribute:
    """A fixed value, until the script sets the attribute (then the engine has it)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, kind: type | None = None) -> Any:
        if engine is None:
            return self
        kept = vars(engine._engine)
        return kept[self._name] if self._name in kept else copy.copy(ATTRIBUTES[self._name])


def _method(name: str) -> Callable[[Getters], Any]:
    def get(self: Getters) -> Any:
        if name in ANSWERS:
            return copy.deepcopy(ANSWERS[name])
        found: Any = self._config
        for part in PATHS[name].split("."):
            found = getattr(found, part)
        return found

    get.__name__ = name
    get.__qualname__ = f"Getters.{name}"
    return get


for _name in (*PATHS, *ANSWERS):
    setattr(Getters, _name, _method(_name))
for _name in ATTRIBUTES:
    setattr(Getters, _name, _Attribute(_name))


__all__ = ["Getters"]
