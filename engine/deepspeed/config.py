"""`deepspeed.runtime.config`: a config as a DeepSpeed script reads it.

`DeepSpeedConfig` has DeepSpeed's attributes and defaults, and works out the batch sizes. It is for reading:
`initialize` checks the config itself (`xds.Config`), and complains about keys that xds does not know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.distributed as dist

from ...utils.arguments import wrong
from ...utils.errors import ConfigError, UsageError
from ...utils.schema.section import AUTO, is_auto
from ...zero.config import ZeroConfig
from ..config.batch import MICRO, STEPS, TRAIN, solve_batch
from ..config.config import Config
from ..config.text import read_source
from ..model.precision import DTYPES
from .errors import methods_raise_theirs


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


class ZeroStageEnum(IntEnum):
    """The stages; each shards also what the one before it shards."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


# -- sections: the given values over DeepSpeed's defaults ---------------------------------------------------

_OFFLOAD_PARAM: dict[str, Any] = {
    **{"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 100_000_000},
    **{"max_in_cpu": 1_000_000_000, "pin_memory": True},
}
_OFFLOAD_OPTIMIZER: dict[str, Any] = {
    **{"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True},
    **{"pipeline_read": False, "pipeline_write": False, "fast_init": False, "ratio": 1.0},
    **{"super_offload": False, "cpuadam_cores_perc": 0.8},
}
_ZERO: dict[str, Any] = {
    **{"contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 500_000_000},
    **{"use_multi_rank_bucket_allreduce": True, "allgather_partitions": True},
    **{"allgather_bucket_size": 500_000_000, "compute_grad_norm": True},
    **{"load_from_fp32_weights": True, "elastic_checkpoint": False, "offload_param": None},
    **{"offload_optimizer": None, "sub_group_size": 1_000_000_000, "cpu_offload": None},
    **{"prefetch_bucket_size": 50_000_000, "param_persistence_threshold": 100_000},
    **{"model_persistence_threshold": sys.maxsize, "max_live_parameters": 1_000_000_000},
    **{"max_reuse_distance": 1_000_000_000, "gather_16bit_weights_on_model_save": False},
    **{"ignore_unused_parameters": True, "round_robin_gradients": False},
    **{"zero_hpz_partition_size": 1, "zero_quantized_weights": False},
    **{"zero_quantized_nontrainable_weights": False, "zero_quantized_gradients": False},
    **{"mics_shard_size": -1, "mics_hierarchical_params_gather": False},
    **{"memory_efficient_linear": True, "enable_sanity_checks": False},
}
_FP16: dict[str, Any] = {
    **{"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16},
    **{"loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False},
    **{"min_loss_scale": 1, "fp16_master_weights_and_grads": False},
}
_BF16: dict[str, Any] = {
    **{"enabled": False, "immediate_grad_update": False, "check_grad_overflow": True},
    **{"bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
}


def _section(defaults: Mapping[str, Any], given: Any) -> SimpleNamespace:
    """The values that are given and not "auto", over the defaults, as attributes."""
    kept = {key: value for key, value in dict(given or {}).items() if not is_auto(value)}
    return SimpleNamespace(**{**defaults, **kept})


class DeepSpeedZeroConfig(SimpleNamespace):
    """The section zero_optimization as a DeepSpeed script reads it: values given, and DeepSpeed's defaults."""

    def __init__(self, **values: Any) -> None:
        given = {
            ZeroConfig.aliases.get(key, key): value
            for key, value in values.items()
            if not is_auto(value)
        }
        stage = ZeroStageEnum(given.pop("stage", 0))
        overlaps = given.pop("overlap_comm", None)
        super().__init__(**{**_ZERO, **given})
        self.stage = stage
        self.overlap_comm = stage == ZeroStageEnum.weights if overlaps is None else overlaps
        if given.get("cpu_offload"):
            self.offload_optimizer = {"device": "cpu"}
        for name, defaults in (
            ("offload_param", _OFFLOAD_PARAM),
            ("offload_optimizer", _OFFLOAD_OPTIMIZER),
        ):
            section = getattr(self, name)
            if section is not None:
                made = _section(defaults, section)
                made.device = OffloadDeviceEnum(made.device)
                setattr(self, name, made)


# -- the whole config ---------------------------------------------------------------------------------------


SIZES = (TRAIN, MICRO, STEPS)


def fill(given: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """The three batch sizes by the config's keys, each worked out from the others where it is not given.

    A size that is "auto" counts as not given.

    Raises:
        UsageError: only the steps are given, or the sizes do not fit together.
    """
    auto = tuple(key for key in SIZES if given.get(key) == AUTO)
    known = {key: given[key] for key in SIZES if key not in auto and given.get(key) is not None}
    for key, value in known.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise wrong(key, value, "a whole number of at least 1")
    train, micro, steps = (known.get(key, 0) for key in SIZES)
    sizes, complaints = solve_batch(train, micro, steps, ranks, auto)
    if complaints:
        raise UsageError("; ".join(complaints))
    return dict(zip(SIZES, sizes, strict=True))


@final
class GivenConfig(dict[str, Any]):
    """`engine.config`: scripts read keys (`config["zero_optimization"]["stage"]`, `config.get`)."""

    def __init__(self, source: Any, checked: Config) -> None:
        given = source.model_dump(exclude_unset=True) if isinstance(source, Config) else None
        found = read_source(source)[0] if given is None else given
        super().__init__(found)
        self._checked = checked

    def __getattr__(self, name: str) -> Any:
        if name == "_checked":  # before __init__ has set it, in a copy
            raise AttributeError(name)
        return getattr(self._checked, name)


DeepSpeedConfigError = ConfigError

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
DEEPSPEED_OPTIMIZERS = [
    *("adagrad", ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, "muadam", "muadamw", "musgd"),
    *(LION_OPTIMIZER, MUON_OPTIMIZER),
]

# attribute -> (path of the key, DeepSpeed's default)
_VALUES: dict[str, tuple[str, Any]] = {
    "train_batch_size": ("train_batch_size", None),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", None),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "steps_per_print": ("steps_per_print", None),
    "dump_state": ("dump_state", False),
    "disable_python_gc": ("disable_python_gc", False),
    "disable_allgather": ("disable_allgather", False),
    "prescale_gradients": ("prescale_gradients", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "gradient_allreduce_op": ("gradient_allreduce_op", "mean"),
    "gradient_clipping": ("gradient_clipping", 1.0),
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "memory_breakdown": ("memory_breakdown", False),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "log_level": ("log_level", None),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "grad_accum_dtype": ("data_types.grad_accum_dtype", None),
    "param_dtype": ("data_types.param_dtype", None),
    "buffer_dtype": ("data_types.buffer_dtype", None),
    "keep_in_fp32_modules": ("data_types.keep_in_fp32_modules", "auto"),
    "eigenvalue_enabled": ("eigenvalue.enabled", False),
    "eigenvalue_verbose": ("eigenvalue.verbose", False),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "amp_enabled": ("amp.enabled", False),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "graph_harvesting": ("graph_harvesting", False),
    "elasticity_enabled": ("elasticity.enabled", False),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
}
_TAG_MODES = ("WARN", "IGNORE", "FAIL")


class DtypeEnum(Enum):
    """A torch dtype by any of its names: `DtypeEnum("bf16").value`."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        names = {
            "half": "fp16",
            "float16": "fp16",
            "float": "fp32",
            "float32": "fp32",
            "bfloat16": "bf16",
        }
        name = str(value).removeprefix("torch.")
        return cls.__members__.get(names.get(name, name))


@methods_raise_theirs
class DeepSpeedConfig:
    """The attributes of a config, and `zero_config`, `float16_config`, `bfloat16_config`.

    Args:
        config: a path, JSON or Hjson text, base64 of it, or a dict.
        mpu: an object with `get_data_parallel_world_size` or `get_sequence_parallel_world_size`.
        mesh_device: a device mesh with the axis "data_parallel".
    Raises:
        ConfigError: the config cannot be read, or a value of it is wrong.
        UsageError: the batch sizes do not fit together. Both are a ValueError and an AssertionError here.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    log_level: str | None
    param_dtype: str | None
    buffer_dtype: str | None

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        data, source, complaints = read_source(os.fspath(config) if _is_path(config) else config)
        if complaints:
            raise ConfigError(complaints, source)
        self._param_dict: dict[str, Any] = data
        is_running = dist.is_available() and dist.is_initialized()
        self.global_rank = dist.get_rank() if is_running else 0
        self.world_size = _data_ranks(data, mpu, mesh_device) if is_running else 1
        self._read()
        self._configure_train_batch_size()

    def _read(self) -> None:
        data = self._param_dict
        vars(self).update({name: _at(data, *where) for name, where in _VALUES.items()})
        self.optimizer_name = _optimizer_name(_at(data, "optimizer.type", None))
        section = data.get("zero_optimization", {})
        given = {"stage": int(section)} if isinstance(section, bool) else section
        self.zero_config = DeepSpeedZeroConfig(**given)
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        fp16 = self.float16_config = _section(_FP16, data.get("fp16"))
        self.bfloat16_config = _section(_BF16, data.get("bf16", data.get("bfloat16")))
        self.fp16_enabled = self.float16_config.enabled
        self.bfloat16_enabled = self.bfloat16_config.enabled
        if self.fp16_enabled and self.bfloat16_enabled:
            raise ConfigError(["fp16.enabled and bf16.enabled are both true: set one of them"])
        self.fp16_auto_cast = fp16.auto_cast
        self.loss_scale = fp16.loss_scale
        self.initial_dynamic_scale = int(2**fp16.initial_scale_power)
        self.dynamic_loss_scale_args = {  # the arguments of `DynamicLossScaler`
            "init_scale": self.initial_dynamic_scale,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }
        self.communication_data_type = _dtype(data, "communication_data_type", None)
        self.seq_parallel_communication_data_type = _dtype(
            data, "seq_parallel_communication_data_type", torch.float32
        )
        name = _at(data, "torch_autocast.dtype", None)
        self.torch_autocast_dtype = None if name is None else DtypeEnum(name).value
        self.pipeline = dict(data.get("pipeline", {}))
        is_profiled = bool(_at(data, "flops_profiler.enabled", False))
        self.wall_clock_breakdown = bool(data.get("wall_clock_breakdown", False)) or is_profiled
        mode = str(_at(data, "checkpoint.tag_validation", "Warn")).upper()
        if mode not in _TAG_MODES:
            need = "must be Warn, Ignore or Fail"
            raise ConfigError([f"checkpoint.tag_validation = {mode!r}: {need}"])
        self.checkpoint_tag_validation_enabled = mode != "IGNORE"
        self.checkpoint_tag_validation_fail = mode == "FAIL"

    def _configure_train_batch_size(self) -> None:
        self.__dict__.update(fill(self._param_dict, self.world_size))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._param_dict:
            return self._param_dict[name]
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}")


def _is_path(config: Any) -> bool:
    return hasattr(config, "__fspath__")


def _at(data: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value at a dotted path; the default where it, or a section on the way, is absent."""
    found: Any = data
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def _optimizer_name(name: str | None) -> str | None:
    """DeepSpeed writes its own optimizers in lower case."""
    return name.lower() if name is not None and name.lower() in DEEPSPEED_OPTIMIZERS else name


def _dtype(data: Mapping[str, Any], key: str, default: torch.dtype | None) -> torch.dtype | None:
    name = data.get(key)
    if name is None:
        return default
    if str(name).lower() not in DTYPES:
        raise ConfigError([f"{key} = {name!r}: must be one of {', '.join(DTYPES)}"])
    return DTYPES[str(name).lower()]


def _data_ranks(data: Mapping[str, Any], mpu: Any, mesh_device: Any) -> int:
    """The ranks that get different samples."""
    everyone = dist.get_world_size()
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    if mpu is not None:
        return everyone // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    sequence = data.get("sequence_parallel_size", 1)
    return everyone // sequence if isinstance(sequence, int) and sequence > 0 else everyone
