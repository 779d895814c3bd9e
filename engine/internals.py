"""What a layer over the engine needs of it beyond its public methods, as engine/deepspeed does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn

from ..ops.mesh import Mesh
from ..utils.arguments import wrong
from ..zero.access.guards import Guards
from ..zero.core.gather import Gatherer
from .counters import Accumulation
from .parts import Parts
from .states import States
from .steps.training_step import TrainingStep
from .torch_calls import Driver, TorchCalls


@final
class Internals:
    """The inside of one engine. It may change with every version."""

    def __init__(
        self,
        parts: Parts,
        step: TrainingStep,
        states: States,
        accumulation: Accumulation,
        guards: Guards,
        torch_calls: TorchCalls,
    ) -> None:
        self._parts = parts
        self._step = step
        self._states = states
        self._accumulation = accumulation
        self._guards = guards
        self._torch_calls = torch_calls

    @property
    def rank_mesh(self) -> Mesh:
        """The places of ranks: pipeline, data, sequence and tensor ranks."""
        return self._parts.sharded.flat_groups.mesh

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with other samples, and those that share a sequence with one of them."""
        return self._parts.sharded.flat_groups.data.everyone.group

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Those that the engine has opened or was given."""
        return [one.group for one in self._parts.opened if one.group is not None]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._parts.sharded.collectives.barrier()

    @property
    def is_destroyed(self) -> bool:
        return self._states.are_released

    @property
    def access_guards(self) -> Guards:
        """What watches the module's state_dict and copies."""
        return self._guards

    def let_torch_calls_go_to(self, adapter: Driver) -> None:
        """`optimizer.step()` and `zero_grad()` of the script call `adapter` from now on."""
        self._torch_calls.go_to(adapter)

    @property
    def in_no_sync(self) -> bool:
        return self._accumulation.in_no_sync

    @property
    def last_grad_norm(self) -> float | None:
        """`get_global_grad_norm`, also where the config hides it from scripts."""
        return self._step.grad_norm

    def loss_scale_state(self) -> dict[str, Any]:
        """The numbers of the loss scale."""
        return self._parts.loss_scale.state_dict()

    def reduce_gradients(self) -> None:
        """Reduce what backward has left, after the last backward of a step. A collective."""
        self._parts.sharded.reduce_rest(also_held=self._step.reduces_when_asked())

    def has_exact_sums(self) -> bool:
        """After the last backward of a step: each rank has the whole sums of all ranks."""
        return self._step.reduces_when_asked() and not self._parts.sharded.reduction.is_lossy

    @property
    def has_seen_backward(self) -> bool:
        """A backward has run since the last step."""
        return self._parts.sharded.backward_pass.has_seen_one

    def allow_grads(self, grads: Iterable[Tensor]) -> None:
        """`param.grad` may be one of these tensors: the layer has put it there. Others are refused."""
        if not isinstance(grads, Iterable):
            raise wrong("allow_grads: grads", grads, "an iterable of tensors")
        self._parts.sharded.backward_pass.manual_grads.allow(grads)

    def params_without_grad(self) -> list[nn.Parameter]:
        """The trained parameters that had no gradient in the last backward."""
        return [
            one
            for grads in self._parts.sharded.backward_pass.trained
            for one in grads.arrivals.absent
        ]

    @property
    def param_gatherer(self) -> Gatherer | None:
        """What gathers the units of stage 3; None at other stages."""
        return self._parts.sharded.gatherer
