"""`deepspeed.zero`: builds and reads a sharded model, with DeepSpeed's arguments."""

from __future__ import annotations

from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from ..engine.model.zero_init import Init as XdsInit
from ..utils.errors import UsageError
from ..zero.access.gathered import GatheredParameters as GatheredParameters
from ..zero.core.outside import register_external_parameter as register_external_parameter
from .missing import placeholder

ZEROPP_KEYS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_hpz_partition_size",
)


@final
class Init:
    """`xds.zero.Init` with DeepSpeed's arguments: modules constructed in the context are sharded at stage 3.

    There are two differences. Without a config, parameters keep the dtype they are built in (DeepSpeed uses
    half), and no class stays patched after the context.
    """

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        """
        Args:
            config_dict_or_path, config: the config that `initialize` will get.
            dtype: the dtype of the slices from the start.
            mpu: its data-parallel group is used.
            mem_efficient_linear, pin_memory: without effect.
            remote_device: None, "none", "cpu" or "cuda"; slices are on the device of the engine.
        Raises:
            UsageError: an argument asks for slices on a disk, or for ZeRO++, which the config chooses.
        """
        if remote_device == "nvme":
            raise UsageError(
                'zero.Init(remote_device="nvme"): slices are built in memory, and initialize moves them to the '
                'disk; leave it out, and set offload_param.device = "nvme" in the config'
            )
        asked = sorted(name for name, value in others.items() if value)
        if asked and asked[0] in ZEROPP_KEYS:
            raise UsageError(
                f"zero.Init({asked[0]}=...): the config decides; leave it out, and set zero_optimization."
                f"{asked[0]} there"
            )
        if asked:
            raise UsageError(
                f"zero.Init({asked[0]}=...): is not covered by xds.deepspeed; leave it out"
            )
        if data_parallel_group is None and mpu is not None:
            data_parallel_group = mpu.get_data_parallel_group()
        self._init = XdsInit(
            config_dict_or_path if config_dict_or_path is not None else config,
            module=module,
            dtype=dtype,
            enabled=enabled,
            group=data_parallel_group,
        )

    def __enter__(self) -> Init:
        self._init.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._init.__exit__(kind, error, trace)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: the parameters that a module needs are found during its forward."""


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
