"""`deepspeed.runtime.zero.partition_parameters`: builds a sharded model, and what its parameters answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ....utils.arguments import items
from ....utils.errors import UsageError
from ....utils.schema.section import is_auto
from ....zero.access.gathered import GatheredParameters as XdsGathered
from ....zero.access.gathered import LostEdit
from ....zero.core.owners import ParamOwner, find_owner
from ...config.config import Config, parse_config
from ...config.sections import DataTypes
from ...config.text import read_source
from ...model.precision import compute_dtype
from ...model.zero_init import Init as XdsInit
from ..errors import methods_raise_theirs
from ..library.log import logger
from .parameters import answer_for, answer_for_built

_strict: WeakSet[ParamOwner] = WeakSet()  # owners know nothing of DeepSpeed's keys


@final
class InPlaceModification(UsageError, RuntimeError):
    """The error of `enable_sanity_checks`; DeepSpeed's is a RuntimeError."""


def refuse_edits(source: Any, owners: Iterable[ParamOwner | None]) -> None:
    """From now on such edits of the parameters of `owners` are errors, if the config `source` says so."""
    if source is None or isinstance(source, Config):
        return
    data = source if isinstance(source, Mapping) else read_source(source)[0]
    section = data.get("zero_optimization") if isinstance(data, Mapping) else None
    if isinstance(section, Mapping) and section.get("enable_sanity_checks") is True:
        _strict.update(owner for owner in owners if owner is not None)


def drop_or_refuse(error: LostEdit, params: Iterable[Any]) -> None:
    """Warn of the edit that `error` describes. The parameters already have their values of before.

    Raises:
        InPlaceModification: their config has enable_sanity_checks.
    """
    owners = [find_owner(param) for param in params if isinstance(param, nn.Parameter)]
    if any(owner in _strict for owner in owners if owner is not None):
        raise InPlaceModification(f"in-place modification: {error}") from error
    logger.warning("%s", error)


class ZeRORuntimeException(UsageError):
    """A setting of ZeRO that cannot work."""


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True: the engine checks an optimizer when it gets it, and names what it needs."""
    return isinstance(optimizer, torch.optim.Optimizer)


ZEROPP_KEYS = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_hpz_partition_size",
)


@methods_raise_theirs
class Init:
    """`xds.zero.Init` with DeepSpeed's arguments: modules constructed in the context are sharded at stage 3.

    With a config that trains in 16 bits, parameters have that dtype from here on; from `initialize` on if it
    keeps modules in fp32. There are three differences.
    Without a config they keep the dtype they are built in (DeepSpeed uses half). On one rank they stay whole.
    No class stays patched after the context.
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
            config_dict_or_path, config: the config that `initialize` will get. Keys whose value is "auto" are
                left out here: an integration fills them before `initialize`.
            dtype: the dtype of the parameters; None is the config's fp16 or bf16, else that of construction.
            mpu: its data-parallel group is used.
            mem_efficient_linear, pin_memory: without effect.
            remote_device: None, "none", "cpu" or "cuda"; slices are on the device of the engine.
        Raises:
            UsageError: an argument asks for slices on a disk, or for ZeRO++, which the config chooses.
        """
        _check(remote_device, others)
        if data_parallel_group is None and mpu is not None:
            data_parallel_group = mpu.get_data_parallel_group()
        source = _without_auto(config_dict_or_path if config_dict_or_path is not None else config)
        self._dtype = dtype or _dtype_of(source)
        self._hook: Any = None
        self._built: list[nn.Parameter] = []
        self._init = XdsInit(
            source, module=module, dtype=self._dtype, enabled=enabled, group=data_parallel_group
        )
        if self._stays_whole and data_parallel_group is None:
            _refuse_one_rank_of_several()
        answer_for([self._init.store])
        refuse_edits(source, [self._init.store])
        if module is not None and self._stays_whole:
            self._built.extend(module.parameters())
            self._keep_built()

    @property
    def _stays_whole(self) -> bool:
        return self._init.is_at_stage_3 and self._init.store is None

    def __enter__(self) -> Init:
        if self._stays_whole:
            self._hook = register_module_parameter_registration_hook(self._note)
        self._init.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._init.__exit__(kind, error, trace)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._keep_built()

    def _note(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            answer_for_built(param)
            self._built.append(param)

    def _keep_built(self) -> None:
        """Give the parameters of one rank, which stay whole, their dtype."""
        for param in self._built:
            answer_for_built(param)
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)
        self._built = []


class MiCS_Init(Init):
    """`Init`: the config's `mics_shard_size` alone decides how many ranks share a copy of the model."""


@methods_raise_theirs
class GatheredParameters:
    """`xds.zero.GatheredParameters`. None in the list, such as a missing bias, is left out."""

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, Iterable) and not isinstance(params, Tensor | nn.Module):
            params = [param for param in params if param is not None]
        self._listed = _listed(params)
        self._gathered = XdsGathered(params, modifier_rank, fwd_module, enabled)

    def __enter__(self) -> None:
        self._gathered.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._gathered.__exit__(kind, error, trace)
        except LostEdit as lost:
            drop_or_refuse(lost, self._listed)


def _listed(params: Any) -> list[Any]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    return items(
        "GatheredParameters: params", params, "a parameter, a module, or a list of parameters"
    )


def _check(remote_device: str | None, others: Mapping[str, Any]) -> None:
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


def _refuse_one_rank_of_several() -> None:
    """Raise where this rank would have the whole model though the launcher started several."""
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdecimal() and int(launched) > 1:
        raise UsageError(
            f"zero.Init: its process group has one rank, but the launcher says WORLD_SIZE={launched}, so "
            "every rank would have the whole model; call deepspeed.init_distributed() before the first process "
            "group is made, or pass data_parallel_group where one rank is what you want"
        )


def _dtype_of(source: Any) -> torch.dtype | None:
    """The 16 bits of the config; None where modules stay fp32: only `initialize` knows their whole names."""
    if source is None:
        return None
    config = parse_config(source)
    return None if config.data_types.keep_in_fp32_modules else compute_dtype(config)


def _without_auto(source: Any) -> Any:
    """The config without keys whose value is "auto": an integration fills them later.

    An optimizer or schedule with such a key is left out whole, because the rest may lack a required key.
    """
    if source is None or isinstance(source, Config):
        return source
    data, _, complaints = read_source(source)
    if complaints or not isinstance(data, dict):
        return source
    filled = _filled(data)
    waiting = [key for key in ("optimizer", "scheduler") if filled.get(key) != data.get(key)]
    return {key: value for key, value in filled.items() if key not in waiting}


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _filled(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if not is_auto(value) or key in DataTypes.own_auto
    }


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: the parameters that a module needs are found during its forward."""
