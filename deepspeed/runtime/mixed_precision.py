"""What DeepSpeed's engine reads of its config as an object, `_config`: dtypes, clipping, the logger's level."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ...engine.config.config import Config
from ...engine.config.text import read_source
from ...utils.errors import UsageError
from ..utils.logging import set_log_level_from_string
from .config import DeepSpeedConfig, DtypeEnum
from .getters import Getters

_BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_CAST = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # narrower dtypes have scales beside them


class MixedPrecision(Getters):
    """Part of `DeepSpeedEngine`."""

    module: Any
    get_batch_info: Any

    @property
    def _config(self) -> DeepSpeedConfig:
        """The config with DeepSpeed's attributes, for reading."""
        kept: DeepSpeedConfig | None = self.__dict__.get("_read_config")
        if kept is None:
            engine, given = self.__dict__["_engine"], getattr(self, "config")  # noqa: B009 (of the engine)
            ranks = SimpleNamespace(get_data_parallel_world_size=lambda: engine.dp_world_size)
            sizes = dict(zip(_BATCH_SIZES, self.get_batch_info(), strict=True))
            kept = DeepSpeedConfig({**given, **sizes}, mpu=ranks)
            kept.gradient_clipping = engine.config.gradient_clipping
            self.__dict__["_read_config"] = kept
        return kept

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: they are not clipped."""
        return float(self._config.gradient_clipping)

    def log_level(self) -> str | None:
        """The level of DeepSpeed's logger in the config."""
        level: str | None = self._config.log_level
        return level

    def _follow_config(self) -> None:
        """Set the level of DeepSpeed's logger, and the dtype of buffers, where the config has one."""
        level = self.log_level()
        if level is not None:
            set_log_level_from_string(level)
        if self._config.buffer_dtype is not None:
            _cast(self.module.buffers(), DtypeEnum(self._config.buffer_dtype).value)

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """(dtype of parameters, dtype of buffers); None: they keep theirs."""
        found = _precision(self)
        buffers = self._config.buffer_dtype
        given = None if found == torch.float32 else found
        return given, None if buffers is None else DtypeEnum(buffers).value

    def _assert_valid_mixed_precision_config(self) -> None:
        """Raise AssertionError where data_types.param_dtype is not what fp16 or bf16 enables."""
        given = self._config.param_dtype
        if given is not None and DtypeEnum(given).value != _precision(self):
            raise AssertionError(
                f"data_types.param_dtype = {given!r}: fp16 and bf16 say {_precision(self)}; enable the one "
                "that you mean, or remove the key"
            )

    def _cast_module_mixed_precision(
        self,
        param_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        is_zero_init_model: bool,
        keep_pattern: Any = None,
    ) -> None:
        """Cast the module's parameters and buffers; integers and dtypes of 8 bits or less stay.

        Args:
            is_zero_init_model: parameters have their dtype already.
            keep_pattern: not supported.
        """
        if keep_pattern is not None:
            raise UsageError(
                "keep_in_fp32_modules: one dtype for all parameters is needed; remove it"
            )
        if param_dtype is not None and not is_zero_init_model:
            _cast(self.module.parameters(), param_dtype)
        if buffer_dtype is not None:
            _cast(self.module.buffers(), buffer_dtype)


def without_buffer_dtype(source: Any) -> Any:
    """`source` as a dict without data_types.buffer_dtype, which this layer does itself; else `source`."""
    if isinstance(source, Config):
        return source
    data, _, complaints = read_source(source)
    types = data.get("data_types")
    if complaints or not isinstance(types, Mapping) or types.get("buffer_dtype") is None:
        return source
    kept = {key: value for key, value in types.items() if key != "buffer_dtype"}
    return {**data, "data_types": kept}


def _precision(engine: Any) -> torch.dtype:
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def _cast(tensors: Any, dtype: torch.dtype) -> None:
    for one in tensors:
        if one.dtype in _CAST:
            one.data = one.data.to(dtype)


__all__ = ["MixedPrecision"]
