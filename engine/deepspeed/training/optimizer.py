"""The classes of the optimizer that `initialize` returns, as DeepSpeed names them, by stage and precision.

    stage 3         DeepSpeedZeroOptimizer_Stage3        fp32_partitioned_groups_flat
    stages 1, 2     DeepSpeedZeroOptimizer               single_partition_of_fp32_groups
    stage 1, bf16   BF16_Optimizer (fp32 gradients)      fp32_groups_flat_partition
    stage 0, 16 bit FP16_Optimizer (Adam)                fp32_groups_flat
    stage 0, 16 bit FP16_UnfusedOptimizer (others)       fp32_groups

These lists have this rank's part of the fp32 values, one flat tensor for each group, with gaps of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ....utils.errors import UsageError
from ...engine import Engine
from ...model.precision import compute_dtype
from ...optim.loss_scale import DynamicScale
from ..constants import BASE_OPTIMIZER_STATE, FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT
from ..errors import methods_raise_theirs
from ..library.ops import FusedAdam
from ..missing import refuse_method
from ..params.parameters import DeepSpeedZeRoOffload

# -- loss scales: `deepspeed.runtime.fp16.loss_scaler`, for loops of scripts, and an engine's as scripts read it

SCALE_FACTOR = 2.0


class LossScalerBase:
    """A factor on the loss, `loss_scale`."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor], grad_out: Any
    ) -> tuple[Tensor, ...]:
        return tuple(self.loss_scale * one for one in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Take note of a step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


@final
class LossScaler(LossScalerBase):
    """A factor that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        return False


@final
class DynamicLossScaler(LossScalerBase):
    """Halves after an overflow, doubles after `scale_window` steps without one: the engine's rule.

    Args:
        delayed_shift: the overflow that halves, counted from 1.
        consecutive_hysteresis: a step without overflow restarts the count.
        raise_error_at_min_scale: an overflow at `min_scale` raises; else the scale stays.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self._rule = DynamicScale(
            init_scale,
            scale_window,
            delayed_shift,
            consecutive=consecutive_hysteresis,
            minimum=min_scale,
        )
        self.scale_factor = SCALE_FACTOR
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self._read()

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Some gradient is not finite."""
        return any(
            one.grad is not None and not bool(torch.isfinite(one.grad).all()) for one in params
        )

    def update_scale(self, overflow: bool) -> None:
        at_end = self.cur_scale <= self.min_scale and self.cur_hysteresis <= 1
        if overflow and at_end and not self.raise_error_at_min_scale:
            state = {
                **self._rule.state_dict(),
                "last_overflow": self.cur_iter,
                "step": self.cur_iter + 1,
            }
            self._rule.load_state_dict(state)
        else:
            self._rule.after_step(overflow=overflow)
        self._read()

    def _read(self) -> None:
        state = self._rule.state_dict()
        self.cur_scale = state["value"]
        self.cur_iter, self.last_overflow_iter = int(state["step"]), int(state["last_overflow"])
        self.cur_hysteresis = int(state["left"])


# name -> key of the state of the engine's dynamic scale
_STATE = {"cur_iter": "step", "last_overflow_iter": "last_overflow", "cur_hysteresis": "left"}
# name -> key of the config's section fp16
_KEYS = {
    "scale_window": "loss_scale_window",
    "min_scale": "min_loss_scale",
    "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
}


@final
class RunningScaler(LossScalerBase):
    """Its values are those of now. Only a dynamic scale has a window, a count of steps and a hysteresis."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:  # type: ignore[override]
        """The loss scale of the next backward."""
        return self._engine.loss_scale

    @property
    def dynamic(self) -> bool:  # type: ignore[override]
        """The scale follows the gradients."""
        fp16 = self._engine.config.fp16
        return bool(fp16.enabled and not fp16.loss_scale)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine" or not self.dynamic:
            raise AttributeError(name)
        if name in _STATE:
            return int(self._engine.internals.loss_scale_state()[_STATE[name]])
        if name in _KEYS:
            return getattr(self._engine.config.fp16, _KEYS[name])
        if name == "scale_factor":
            return SCALE_FACTOR
        raise AttributeError(name)


def norm_of_last_step(engine: Engine) -> float | None:
    """The norm before clipping; inf after a skipped step, as in DeepSpeed, whatever the gradients were."""
    norm = engine.get_global_grad_norm()
    return math.inf if norm is not None and math.isnan(norm) else norm


class DeepSpeedOptimizer:
    """The attributes of DeepSpeed's optimizer wrappers that scripts use; all others are the torch optimizer's.

    Like those wrappers it is not a torch.optim.Optimizer: pass `engine.basic_optimizer` to torch's schedules.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self._engine.loss_scale

    loss_scale = cur_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because the gradients were not finite."""
        norm = self._engine.get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    @property
    def loss_scaler(self) -> RunningScaler:
        """The scale and its state, always those of now."""
        kept: RunningScaler | None = self.__dict__.get("_kept_scaler")
        if kept is None:
            kept = self.__dict__["_kept_scaler"] = RunningScaler(self._engine)
        return kept

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is adjusted automatically."""
        return self.loss_scaler.dynamic

    @property
    def custom_loss_scaler(self) -> bool:
        return False

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """The dtype of the parameters in forward and backward."""
        return compute_dtype(self._engine.config) or torch.float32

    @property
    def optimizer(self) -> Any:
        """The torch optimizer."""
        return self._engine.optimizer

    @property
    def _global_grad_norm(self) -> float:
        """The norm of the last step, as `engine.get_global_grad_norm()`; 0 before the first step."""
        return norm_of_last_step(self._engine) or 0.0

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`engine.backward`, but the loss is not divided by the accumulation steps."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`xds.Engine.zero_grad`: drop the gradients of the step."""
        self._engine.optimizer.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`engine.step()` without the schedule. Returns the result of `closure`."""
        return self._engine.optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":
            raise AttributeError(name)
        refuse_method("optimizer", name)
        return getattr(self._engine.optimizer, name)


_REMEDY = "engine.load_checkpoint takes states of any number of ranks"
_STATES_NAMES = (OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE)


@methods_raise_theirs
class WithMasters(DeepSpeedOptimizer):
    """An optimizer with fp32 values of its own."""

    masters_name = ""  # DeepSpeed's name for them, in a state dict too
    states_name = OPTIMIZER_STATE_DICT

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":
            raise AttributeError(name)
        if name == self.masters_name:
            return self.masters()
        return super().__getattr__(name)

    def masters(self) -> list[Tensor]:
        """This rank's fp32 values, one flat tensor for each group; the optimizer's own."""
        return [param for group in self._engine.optimizer.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: what torch's optimizers have, and DeepSpeed's keys for the same tensors.

        It loads at the same number of ranks. `engine.save_checkpoint` writes checkpoints for any number.
        """
        engine = self._engine
        base: dict[str, Any] = engine.optimizer.state_dict()
        saved_masters = {} if not self.masters_name else {self._saved_name(): self.masters()}
        return {
            **base,
            self.states_name: base,
            **saved_masters,
            "loss_scaler": {"cur_scale": engine.loss_scale},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "clip_grad": engine.config.gradient_clipping,
            "zero_stage": engine.zero_optimization_stage(),
            "partition_count": engine.dp_world_size,
        }

    def _saved_name(self) -> str:
        return self.masters_name

    def load_state_dict(
        self,
        state_dict_list: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        **others: Any,
    ) -> None:
        """Take over what `state_dict` returned on this rank. The weights are loaded with the model.

        Args:
            state_dict_list: this rank's, or a list with that of each rank.
            load_from_fp32_weights: without effect.
        Raises:
            UsageError: it is that of another number of ranks.
        """
        engine = self._engine
        is_one = isinstance(state_dict_list, Mapping)
        if not is_one and len(state_dict_list) != engine.dp_world_size:
            raise UsageError(
                f"optimizer.load_state_dict() of {len(state_dict_list)} ranks: there are "
                f"{engine.dp_world_size}; {_REMEDY}"
            )
        mine: Any = state_dict_list if is_one else state_dict_list[engine.dp_rank]  # type: ignore[index]
        base = next((mine[name] for name in _STATES_NAMES if name in mine), mine)
        self._check_sizes(base)
        if load_optimizer_states:
            engine.optimizer.load_state_dict({key: base[key] for key in ("state", "param_groups")})

    def _check_sizes(self, base: Mapping[str, Any]) -> None:
        here = [param.numel() for param in self.masters()]
        for number, state in base["state"].items():
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.dim() == 1 and value.numel() != here[number]:
                    raise UsageError(
                        f"optimizer.load_state_dict(): group {number} has {value.numel()} elements there "
                        f"and {here[number]} here, because the numbers of ranks differ; {_REMEDY}"
                    )


class ZeROOptimizer(WithMasters):
    """At a stage above 0: each rank has a part of the states."""

    @property
    def overflow(self) -> bool:
        norm = self._engine.internals.last_grad_norm  # also where scripts cannot see it
        return norm is not None and not math.isfinite(norm)


@final
class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    masters_name = "single_partition_of_fp32_groups"
    states_name = BASE_OPTIMIZER_STATE

    @property
    def _global_grad_norm(self) -> float | None:  # type: ignore[override]
        """As at other stages, but None with zero_optimization.compute_grad_norm = false."""
        shows = self._engine.config.zero_optimization.shows_grad_norm
        return super()._global_grad_norm if shows else None


@final
class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """Stage 3."""

    masters_name = "fp32_partitioned_groups_flat"

    def _saved_name(self) -> str:
        return FP32_FLAT_GROUPS

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """What libraries take off and put back around generation."""
        kept: DeepSpeedZeRoOffload | None = self.__dict__.get("_offload")
        if kept is None:
            engine = self._engine
            kept = DeepSpeedZeRoOffload(engine.module, engine.internals.param_gatherer)
            self.__dict__["_offload"] = kept
        return kept

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Does nothing: the optimizer's groups always have the fp32 values."""

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Does nothing."""


@final
class BF16_Optimizer(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """Stage 1 in bf16 with gradients in fp32."""

    masters_name = "fp32_groups_flat_partition"


@final
class FP16_Optimizer(WithMasters):  # noqa: N801 (DeepSpeed's name)
    """Stage 0 in fp16 or bf16, with Adam."""

    masters_name = "fp32_groups_flat"


@final
class FP16_UnfusedOptimizer(WithMasters):  # noqa: N801 (DeepSpeed's name)
    """Stage 0 in fp16 or bf16, with another optimizer."""

    masters_name = "fp32_groups"

    def masters(self) -> Any:
        return [list(group["params"]) for group in self._engine.optimizer.param_groups]

    def _check_sizes(self, base: Mapping[str, Any]) -> None:
        """A tensor of each parameter: torch checks the sizes."""


def optimizer_of(engine: Engine) -> torch.optim.Optimizer | DeepSpeedOptimizer | None:
    """The optimizer for scripts: torch's own in fp32 at stage 0."""
    if engine.optimizer is None:
        return None
    stage, config = engine.zero_optimization_stage(), engine.config
    if stage == 1 and config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32":
        return BF16_Optimizer(engine)
    if stage:
        return (DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer)(engine)
    if config.bf16.enabled or config.fp16.enabled:
        is_fused = isinstance(engine.optimizer, FusedAdam)
        return (FP16_Optimizer if is_fused else FP16_UnfusedOptimizer)(engine)
    own: torch.optim.Optimizer = engine.optimizer
    return own
