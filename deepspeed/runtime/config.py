"""`deepspeed.runtime.config`: a config as a DeepSpeed script reads it.

`DeepSpeedConfig` has DeepSpeed's attributes and defaults, and works out the batch sizes. It is for reading:
`initialize` checks the config itself (`xds.Config`), and complains about keys that xds does not know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from ...engine.config.text import read_source
from ...utils.errors import ConfigError
from ...utils.small_files import read_small_text
from ..comm.config import DeepSpeedCommsConfig
from ..errors import methods_raise_theirs
from ..missing import placeholder
from . import batch_sizes
from .config_utils import dict_raise_error_on_duplicate_keys as dict_raise_error_on_duplicate_keys
from .config_utils import get_scalar_param as get_scalar_param
from .precision_config import get_bfloat16_config, get_float16_config
from .zero.config import DeepSpeedZeroConfig

DeepSpeedConfigError = ConfigError

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER),
    *(MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
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
    "eigenvalue_enabled": ("eigenvalue.enabled", False),
    "eigenvalue_verbose": ("eigenvalue.verbose", False),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "amp_enabled": ("amp.enabled", False),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "graph_harvesting": ("graph_harvesting", False),
    "elasticity_enabled": ("elasticity.enabled", False),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
}
_PIPELINE = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
        self.float16_config = get_float16_config(data)
        self.bfloat16_config = get_bfloat16_config(data)
        self.fp16_enabled = self.float16_config.enabled
        self.bfloat16_enabled = self.bfloat16_config.enabled
        if self.fp16_enabled and self.bfloat16_enabled:
            raise ConfigError(["fp16.enabled and bf16.enabled are both true: set one of them"])
        self.fp16_auto_cast = self.float16_config.auto_cast
        self.loss_scale = self.float16_config.loss_scale
        self.initial_dynamic_scale = self.float16_config.initial_dynamic_scale()
        self.dynamic_loss_scale_args = self.float16_config.dynamic_loss_scale_args()
        self.communication_data_type = _dtype(data, "communication_data_type", None)
        self.seq_parallel_communication_data_type = _dtype(
            data, "seq_parallel_communication_data_type", torch.float32
        )
        name = _at(data, "torch_autocast.dtype", None)
        self.torch_autocast_dtype = None if name is None else DtypeEnum(name).value
        self.pipeline = {**_PIPELINE, **data.get("pipeline", {})}
        is_profiled = bool(_at(data, "flops_profiler.enabled", False))
        self.wall_clock_breakdown = bool(data.get("wall_clock_breakdown", False)) or is_profiled
        mode = str(_at(data, "checkpoint.tag_validation", "Warn")).upper()
        if mode not in _TAG_MODES:
            need = "must be Warn, Ignore or Fail"
            raise ConfigError([f"checkpoint.tag_validation = {mode!r}: {need}"])
        self.checkpoint_tag_validation_enabled = mode != "IGNORE"
        self.checkpoint_tag_validation_fail = mode == "FAIL"

    def _configure_train_batch_size(self) -> None:
        self.__dict__.update(
            batch_sizes.fill(
                self.train_batch_size,
                self.train_micro_batch_size_per_gpu,
                self.gradient_accumulation_steps,
                self.world_size,
            )
        )

    @property
    def monitor_config(self) -> Any:
        """The sections of monitors, a `DeepSpeedMonitorConfig`."""
        from ..monitor.config import get_monitor_config  # not above: it takes long to import

        return get_monitor_config(self._param_dict)

    @property
    def comms_config(self) -> DeepSpeedCommsConfig:
        """The section comms_logger."""
        return DeepSpeedCommsConfig(self._param_dict)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._param_dict:
            return self._param_dict[name]
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}")

    def print_user_config(self) -> None:
        """Log the config as it was given."""
        from ..utils.logging import logger

        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4))

    def print(self, name: str) -> None:
        """Log every attribute."""
        from ..utils.logging import logger

        logger.info("%s:", name)
        for key in sorted(vars(self).keys() - {"_param_dict"}):
            logger.info("  %s %s %s", key, "." * (29 - len(key)), getattr(self, key))
        self.print_user_config()


@final
class DeepSpeedConfigWriter:
    """Changes top-level keys of a config file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data

    def add_config(self, key: str, value: Any) -> None:
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        text = read_small_text(filename)
        self.data = json.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str) -> None:
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file)


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
    if str(name).lower() not in _DTYPES:
        raise ConfigError([f"{key} = {name!r}: must be one of {', '.join(_DTYPES)}"])
    return _DTYPES[str(name).lower()]


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


def __getattr__(name: str) -> Any:
    """`get_<attribute>` reads a value of a config that is a dict; others are in the table."""
    where = _VALUES.get(name.removeprefix("get_"))
    if where is not None and name.startswith("get_"):
        return partial(_at, path=where[0], default=where[1])
    return placeholder(__name__, name)


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedConfigWriter", "DtypeEnum"]
