"""`deepspeed.zero`: building and reading a sharded model, with DeepSpeed's arguments."""

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
from .missing import stand_in


@final
class Init:
    """`xds.zero.Init` with DeepSpeed's arguments: modules made inside are born sharded at stage 3.

    Two differences, both in the script's favour: without a config parameters keep the dtype they are built
    in (DeepSpeed takes half), and no class is patched for longer than the context.
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
            config_dict_or_path, config: what `initialize` will get.
            dtype: slices are kept in it from the start.
            mpu: for its data-parallel group.
            mem_efficient_linear, pin_memory: without effect.
            remote_device: None, "none", "cpu" or "cuda"; slices lie where the engine computes.
        Raises:
            UsageError: an argument asks for offload or for ZeRO++.
        """
        if remote_device == "nvme":
            raise UsageError(
                'zero.Init(remote_device="nvme"): offload to NVMe is not there yet; leave it out'
            )
        asked = sorted(name for name, value in others.items() if value)
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
    """Nothing: what a module needs is found in its forwards anyway."""


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
