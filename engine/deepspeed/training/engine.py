"""`DeepSpeedEngine`: an `xds.Engine` that also has the other names of DeepSpeed's engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from types import FunctionType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ....ops.device import device_of
from ....utils.errors import UsageError
from ....zero.core.owners import find_owner
from ...data.loaders import build_loader
from ...engine import Engine
from ...model.precision import DTYPES, compute_dtype
from ..config import GivenConfig
from ..constants import ROUTE_TRAIN
from ..errors import methods_raise_theirs, raises_theirs
from ..library.groups import NO_SEQUENCE_RANKS
from ..missing import refuse_method
from ..params.zero import refuse_edits
from .as_module import AsModule
from .checkpoints import Checkpoints
from .grads import OnlyInfers, ShownGrads, UnusedParams
from .optimizer import norm_of_last_step, optimizer_of
from .values import Values

NO_OWN_REDUCTION = (
    "engine.enable_backward_allreduce = False: gradients are reduced by the engine alone; leave it True, and "
    "put reductions off with `with engine.no_sync():`"
)
GATHER_KEYS = (
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)


@methods_raise_theirs
class EngineAdapter(Values, Checkpoints, AsModule):
    """All other attributes are read from and set on the engine, and then the module."""

    _engine: Engine
    _only_infers: OnlyInfers
    _shown_grads: ShownGrads
    _unused: UnusedParams
    _optimizer: Any
    sequence_groups: Any
    _collate_fn: Callable[[list[Any]], Any] | None

    def __init__(self, engine: Engine, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        optimizer = optimizer_of(engine)
        # not by assignment: __setattr__ sets attributes of the engine
        self.__dict__.update(_engine=engine, _optimizer=optimizer, _collate_fn=collate_fn)
        self.__dict__.update(_only_infers=OnlyInfers(), sequence_groups=None)
        self.__dict__.update(_shown_grads=ShownGrads(engine), _unused=UnusedParams(engine, {}))
        engine.internals.let_torch_calls_go_to(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "_optimizer", "_collate_fn"):  # before __init__ has set them
            raise AttributeError(name)
        if name not in vars(self._engine):  # a script has not set it
            with suppress(KeyError):
                return self._value(name)
        try:
            found = getattr(self._engine, name)
            return (
                raises_theirs(found) if getattr(found, "__self__", None) is self._engine else found
            )
        except AttributeError:  # checked last: the model may have an attribute with a refused name
            refuse_method("engine", name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "enable_backward_allreduce" and not value:
            raise UsageError(NO_OWN_REDUCTION)
        is_method = isinstance(getattr(type(self), name, None), FunctionType)
        # a script replaces a method, or made no engine
        if is_method or "_engine" not in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._engine, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._shown_grads.take_back()
        with self._only_infers:
            return self._engine.forward(*args, **kwargs)

    forward = __call__

    # -- methods with a different form --------------------------------------------------------------------

    @property
    def config(self) -> GivenConfig:
        """The config as it was given, a dict. Its attributes are those of the checked `xds.Config`."""
        checked = self._engine.config
        given: GivenConfig = self.__dict__.get("_given_config") or GivenConfig(checked, checked)
        return given

    def keep_given(self, source: Any, only_infers: OnlyInfers, sequence_groups: Any) -> None:
        """Let `config` show what `initialize` got, and forwards run under `only_infers`.

        sequence_groups: the mpu of the sequence ranks; None: there are none.
        """
        self.__dict__["sequence_groups"] = sequence_groups
        self.__dict__["_only_infers"] = only_infers
        refuse_edits(source, (find_owner(param) for param in self._engine.module.parameters()))
        given = self.__dict__["_given_config"] = GivenConfig(source, self._engine.config)
        self.__dict__["_unused"] = UnusedParams(self._engine, given)
        if "log_level" in given:
            self._follow_config()

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
        self._before_step()
        self._engine.step()

    def end_optimizer_step(self) -> None:
        """`xds.Engine.end_optimizer_step`, which `optimizer.step()` calls."""
        self._before_step()
        self._engine.end_optimizer_step()

    def _before_step(self) -> None:
        if self._engine.internals.in_no_sync:
            raise UsageError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it before the step, "
                "so that gradients are reduced"
            )
        self._shown_grads.bring_own()
        self._shown_grads.take_back()
        self._unused.before_step()
        self._engine.internals.access_guards.forget()

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """`xds.Engine.backward`. At stage 0 in fp32 `param.grad` is the mean over ranks after it."""
        self._shown_grads.take_back()
        found = self._engine.backward(loss, retain_graph, scale_wrt_gas)
        self._shown_grads.show()
        self._unused.after_backward()
        return found

    def zero_grad(self) -> None:
        """`xds.Engine.zero_grad`: drop the gradients."""
        self._shown_grads.forget()
        self._unused.forget()
        self._engine.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> float:
        """`xds.Engine.clip_grad_norm`: the next step clips to `max_norm`; returns the norm."""
        self._shown_grads.take_back()
        return self._engine.clip_grad_norm(max_norm)

    def train(self, mode: bool = True) -> EngineAdapter:
        self._engine.train(mode)
        return self

    def eval(self) -> EngineAdapter:
        return self.train(False)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here reduce nothing; for stages 0 and 1, as in DeepSpeed.

        Raises:
            UsageError: the stage is 2 or 3, or this is inside another no_sync. Also an AssertionError.
        """
        stage = self._engine.zero_optimization_stage()
        if stage > 1:
            raise UsageError(
                f"the no_sync context manager is incompatible with the sharded gradients of stage {stage}: use "
                "engine.coalesce_grad_reduction(), which keeps whole gradients until the step, or stage 1"
            )
        if self._engine.internals.in_no_sync:
            raise UsageError(
                "no_sync context manager reentry is unsupported: leave the outer one first"
            )
        return self._engine.no_sync()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what backward has left, after the last backward of a step. A collective; step() does it too.

        bucket_size: without effect.
        """
        self._engine.internals.reduce_gradients()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Delay the reduction of several backward passes to the next step or the next backward outside."""
        return self._engine.no_sync()

    def empty_partition_cache(self) -> None:
        """Return unused memory to the device. Units are released after each use in any case."""
        device_of(self._engine.device).empty_cache()

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

    def is_first_weights_partition_group(self) -> bool:
        return self.zero_optimization_partition_weights()

    def initial_dynamic_scale(self) -> int:
        return int(2**self._engine.config.fp16.initial_scale_power)

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
        # gradients of 16-bit parameters are summed in fp32 unless the config sets another dtype
        summed = DTYPES[config.data_types.grad_accum_dtype or "fp32"]
        return compute_dtype(config) or torch.float32, summed

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """False only where the config says so. Where it says nothing, weights are gathered."""
        section = self.config.get("zero_optimization")
        keys = section if isinstance(section, Mapping) else {}
        return all(keys.get(name) is not False for name in GATHER_KEYS)

    def get_global_grad_norm(self) -> torch.Tensor | float | None:
        """The norm of the last step before clipping; None before one, inf after a skipped one.

        Shapes:  [], from stage 1 on; at stage 0 a float.
        """
        norm = norm_of_last_step(self._engine)
        if norm is None or not self.zero_optimization():
            return norm
        return torch.tensor(norm, device=self._engine.device)

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
        """The ranks with other samples; those that share a sequence have the same ones."""
        if self.sequence_groups is None:
            return self._engine.internals.data_group
        found: dist.ProcessGroup = self.sequence_groups.get_data_parallel_group()
        return found

    @property
    def seq_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share a sequence, by `initialize(mpu=)` or `initialize(mesh_param=)`."""
        if self.sequence_groups is None:
            raise UsageError(NO_SEQUENCE_RANKS)
        found: dist.ProcessGroup = self.sequence_groups.get_sequence_parallel_group()
        return found

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
                pin_memory=pin_memory and device_of(self._engine.device).pins_memory,
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


@final
class DeepSpeedEngine(EngineAdapter):
    """The engine of a model that every rank has whole, or in shards. `PipelineEngine` counts as a subclass."""

    @property
    def mpu(self) -> None:
        return None
