"""`DeepSpeedEngine`: an `xds.Engine` that also has the other names of DeepSpeed's engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ...engine.data.loaders import build_loader
from ...engine.engine import Engine
from ...utils.errors import UsageError
from ..errors import methods_raise_theirs, raises_theirs
from ..missing import placeholder, refuse_method
from ..profiling.flops_profiler.profiler import FlopsProfiler
from . import queries
from .optimizer import DeepSpeedOptimizer

ROUTE_TRAIN = "train"


@methods_raise_theirs
class DeepSpeedEngine(ABC):
    """All other attributes are read from and set on the engine, and then the module."""

    _engine: Engine
    _optimizer: Any
    _collate_fn: Callable[[list[Any]], Any] | None

    def __init__(self, engine: Engine, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        precisions = (engine.config.fp16.enabled, engine.config.bf16.enabled)
        is_plain = engine.zero_optimization_stage() == 0 and not any(precisions)
        is_bare = is_plain or engine.optimizer is None
        optimizer = engine.optimizer if is_bare else DeepSpeedOptimizer(engine)
        # not by assignment: __setattr__ sets attributes of the engine
        self.__dict__.update(_engine=engine, _optimizer=optimizer, _collate_fn=collate_fn)
        profiler = engine.config.flops_profiler
        if profiler.enabled:
            own = FlopsProfiler.of_engine(self, profiler.recompute_fwd_factor)
            self.__dict__["flops_profiler"] = own

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "_optimizer", "_collate_fn"):  # before __init__ has set them
            raise AttributeError(name)
        if queries.knows(name):
            return partial(queries.answer, self._engine.config, name)
        try:
            found = getattr(self._engine, name)
            return raises_theirs(found) if getattr(found, "__self__", None) is self._engine else found
        except AttributeError:  # checked last: the model may have an attribute with a refused name
            refuse_method("engine", name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine.forward(*args, **kwargs)

    # -- methods with a different form --------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The torch optimizer in fp32 at stage 0; else a view with DeepSpeed's `cur_scale` and `overflow`."""
        return self._optimizer

    @property
    def basic_optimizer(self) -> Any:
        """The torch optimizer; None where every parameter is frozen."""
        return self._engine.optimizer

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """`xds.Engine.step`."""
        if lr_kwargs:
            raise UsageError(
                f"engine.step(lr_kwargs={dict(lr_kwargs)}): the engine steps the schedule without arguments; "
                "step it yourself and pass no lr_scheduler"
            )
        self._engine.step()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self._engine.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Delay the reduction of several backward passes to the next step or the next backward outside."""
        return self._engine.no_sync()

    def empty_partition_cache(self) -> None:
        """Return unused memory to the device. Units are released after each use in any case."""
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- queries that need more than one config key -------------------------------------------------------

    def zero_optimization(self) -> bool:
        return self._engine.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self._engine.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._engine.zero_optimization_stage() >= 3

    def dynamic_loss_scale(self) -> bool:
        """Whether no fixed loss scale is set, as in DeepSpeed. fp32 and bf16 have no loss scale at all."""
        return self._engine.config.fp16.loss_scale == 0.0

    def initial_dynamic_scale(self) -> float:
        return float(2**self._engine.config.fp16.initial_scale_power)

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples per step, samples per rank and forward, accumulation steps)."""
        engine = self._engine
        micro_batch, steps = (
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        return engine.train_batch_size(), micro_batch, steps

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of parameters, dtype of accumulated gradients)."""
        config = self._engine.config
        compute = torch.float32
        if config.fp16.enabled:
            compute = torch.float16
        elif config.bf16.enabled:
            compute = torch.bfloat16
        named = {"fp16": torch.float16, "bf16": torch.bfloat16}
        # gradients of 16-bit parameters are summed in fp32 unless the config sets another dtype
        return compute, named.get(config.data_types.grad_accum_dtype or "fp32", torch.float32)

    def get_type(self) -> list[str]:
        """The optimizer's class name, for every parameter group."""
        return [type(self.basic_optimizer).__name__] * len(self.basic_optimizer.param_groups)

    @property
    @abstractmethod
    def mpu(self) -> Any:
        """The places of ranks in a pipeline; None without one."""

    @property
    def mp_world_size(self) -> int:
        return 1

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._engine._sharded.flat_groups.data.everyone.group

    def get_data_parallel_rank(self) -> int:
        return self._engine.dp_rank

    def get_model_parallel_rank(self) -> int:
        return 0

    # -- data -------------------------------------------------------------------------------------------

    def deepspeed_io(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """This rank's loader over `dataset`; shuffled where `route` is "train" and no sampler is given."""
        size = batch_size or self._engine.train_micro_batch_size_per_gpu()
        collate = collate_fn or self._collate_fn
        drop_last = self._engine.config.dataloader_drop_last
        workers = num_local_io_workers or 0
        if data_sampler is not None:
            return DataLoader(
                dataset,
                size,
                sampler=data_sampler,
                collate_fn=collate,
                drop_last=drop_last,
                num_workers=workers,
                pin_memory=pin_memory and self._engine.device.type == "cuda",
            )
        return build_loader(
            dataset,
            micro_batch_size=size,
            rank=self._engine.dp_rank,
            world_size=self._engine.dp_world_size,
            collate_fn=collate,
            drop_last=drop_last,
            shuffle=route == ROUTE_TRAIN,
            num_workers=workers,
        )

    # -- weights and checkpoints --------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """`xds.Engine.save_checkpoint`."""
        name = None if tag is None else str(tag)
        return self._engine.save_checkpoint(
            save_dir, name, client_state, save_latest, exclude_frozen_parameters
        )

    def load_checkpoint(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """`xds.Engine.load_checkpoint`."""
        if custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint(custom_load_fn=...): not covered; load with load_module_only=True, then edit "
                "parameters with GatheredParameters"
            )
        return self._engine.load_checkpoint(
            load_dir,
            None if tag is None else str(tag),
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole weights, in the compute dtype, to one file on rank 0. A collective."""
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            folder = Path(save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, folder / save_filename)
        self._engine._sharded.collectives.barrier()  # the file exists when this returns
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Whole weights on rank 0, on the CPU, in the compute dtype; None on other ranks. A collective."""
        weights = self._engine.full_state_dict(rank0_only=True)
        if not weights:
            return None
        params = dict(self._engine.module.named_parameters(remove_duplicate=False))
        kept = {}
        for name, value in weights.items():
            param = params.get(name)
            if param is None or param.requires_grad or not exclude_frozen_parameters:
                kept[name] = value if param is None else value.to(param.dtype)
        return kept

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's own state_dict. At stage 3 a rank does not have whole values: use full_state_dict().

        Raises:
            UsageError: stage 3.
        """
        if self.zero_optimization_partition_weights():
            raise UsageError(
                "engine.module_state_dict() at stage 3: a rank holds only slices; call "
                "engine.full_state_dict() or save_16bit_model on every rank"
            )
        weights: dict[str, Any] = self._engine.module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            for name, param in self._engine.module.named_parameters():
                if not param.requires_grad:
                    weights.pop(prefix + name, None)
        return weights


@final
class PlainEngine(DeepSpeedEngine):
    """The engine of a model that every rank has whole, or in shards."""

    @property
    def mpu(self) -> None:
        return None


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
