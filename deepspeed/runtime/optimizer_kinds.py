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
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ...engine.engine import Engine
from ...utils.errors import UsageError
from ..errors import methods_raise_theirs
from ..ops.adam import FusedAdam
from .optimizer import DeepSpeedOptimizer
from .zero import gradient_lists
from .zero.parameter_offload import DeepSpeedZeRoOffload
from .zero.parameters import note_second_shard

_REMEDY = "engine.load_checkpoint takes states of any number of ranks"
OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE = "optimizer_state_dict", "base_optimizer_state"
_STATES_NAMES = (OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE)


@methods_raise_theirs
class WithMasters(DeepSpeedOptimizer):
    """An optimizer with fp32 values of its own."""

    masters_name = ""  # DeepSpeed's name for them, in a state dict too
    states_name = OPTIMIZER_STATE_DICT
    is_elastic = False  # zero_optimization.elastic_checkpoint, which changes a name of stage 3

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
        norm = self._engine._step.grad_norm  # also where scripts cannot see it
        return norm is not None and not math.isfinite(norm)

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """`gradient_lists.averaged_gradients`."""
        return gradient_lists.averaged_gradients(self._engine)


@final
class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    masters_name = "single_partition_of_fp32_groups"
    states_name = BASE_OPTIMIZER_STATE
    check_grad_overflow = True  # gradients that are not finite are found in every precision
    unscale_and_clip_grads = gradient_lists.unscale_and_clip_grads
    custom_loss_scaler = False

    @property
    def loss_scaler(self) -> Any:
        """The scale and its state. An optimizer without an engine may be given one."""
        given = self.__dict__.get("_given_scaler")
        return self if given is None and "_engine" not in self.__dict__ else given or self._scaler()

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        if "_engine" in self.__dict__:
            raise UsageError(
                f"optimizer.loss_scaler = {type(scaler).__name__}: the engine has its own; set fp16.loss_scale "
                "in the config"
            )
        self.__dict__["_given_scaler"] = scaler

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward."""
        return float(self.loss_scaler.cur_scale)

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, Tensor]:
        """`gradient_lists.accumulated_grads_in_cpu`."""
        return gradient_lists.accumulated_grads_in_cpu(self._engine)

    @property
    def _global_grad_norm(self) -> float | None:  # type: ignore[override]
        """As at other stages, but None with zero_optimization.compute_grad_norm = false."""
        shows = self._engine.config.zero_optimization.shows_grad_norm
        return super()._global_grad_norm if shows else None


@final
class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """Stage 3."""

    masters_name = "fp32_partitioned_groups_flat"

    @property
    def states_name(self) -> str:  # type: ignore[override]
        """DeepSpeed's name for the states, with elastic_checkpoint another one."""
        return BASE_OPTIMIZER_STATE if self.is_elastic else OPTIMIZER_STATE_DICT

    def _saved_name(self) -> str:
        return "fp32_flat_groups"

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each tensor of `fp32_partitioned_groups_flat`."""
        return gradient_lists.params_of_masters(self._engine)

    @property
    def parameter_offload(self) -> DeepSpeedZeRoOffload:
        """What libraries take off and put back around generation."""
        kept: DeepSpeedZeRoOffload | None = self.__dict__.get("_offload")
        if kept is None:
            engine = self._engine
            kept = DeepSpeedZeRoOffload(engine.module, engine._sharded._gatherer)
            self.__dict__["_offload"] = kept
        return kept

    @property
    def leaf_parameters(self) -> dict[torch.nn.Module, list[torch.nn.Parameter]]:
        """`gradient_lists.leaf_parameters`."""
        return gradient_lists.leaf_parameters(self._engine)

    @property
    def grad_partitions_flat_buffer(self) -> Tensor:
        """`gradient_lists.flat_partition`, for reading."""
        return gradient_lists.flat_partition(self._engine)

    def _get_norm_groups(self) -> list[Tensor]:
        """`gradient_lists.norms_of_groups`."""
        return gradient_lists.norms_of_groups(self._engine)

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
        note_second_shard(engine.module, config.zero_optimization.zero_hpz_partition_size)
        return (DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer)(engine)
    if config.bf16.enabled or config.fp16.enabled:
        is_fused = isinstance(engine.optimizer, FusedAdam)
        return (FP16_Optimizer if is_fused else FP16_UnfusedOptimizer)(engine)
    own: torch.optim.Optimizer = engine.optimizer
    return own


__all__ = [
    "BF16_Optimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "ZeROOptimizer",
    "optimizer_of",
]
