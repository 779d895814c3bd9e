"""The gradients of a step, and the parameters, as DeepSpeed's ZeRO optimizers list them.

They are for reading. `safe_set_full_grad` changes a gradient at every stage and number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....engine.engine import Engine
from ....zero.access.owners import Owner, find_owner
from ...comm import comm as dist
from ...utils.leaf_modules import get_z3_leaf_modules


def averaged_gradients(engine: Engine) -> dict[int, list[Tensor]]:
    """This rank's parts of the gradients that step() will use, for each parameter group. A collective.

    - Empty unless the last backward of a step has run, and step() has not.
    - They are the mean over ranks, in fp32 for 16-bit parameters, and have the loss scale.
    - On one rank they are the engine's own tensors, so writes count. On several ranks they are copies.

    Shapes:  one 1-D tensor for each parameter of which this rank has elements; [0] where it has none.
    """
    found: dict[int, list[Tensor]] = {}
    factor = engine._step.gradient_factor() * engine.loss_scale
    for param, owner in _trained(engine):
        if owner.holds_grads(param):
            return {}
    for master in engine._parts.updater.masters:
        held = master.grads.reduced()
        if held is None:
            return {}
        for item in master.items:
            at = item.start
            parts = [held[at + part.start : at + part.stop] for part in item.parts] or [held[:0]]
            given = parts if factor == 1.0 else [part.float() * factor for part in parts]
            found.setdefault(item.group, []).extend(given)
    return found


def norms_of_groups(engine: Engine) -> list[Tensor]:
    """The norm of each parameter group's gradients over all ranks, with the loss scale. A collective.

    Shapes:  one [] for each group that has gradients; no group before the last backward of a step.
    """
    found = averaged_gradients(engine)
    if not found:
        return []
    squares = torch.zeros(len(found), dtype=torch.float64)
    for at, parts in enumerate(found.values()):
        squares[at] = sum(float(part.double().square().sum()) for part in parts)
    summed = squares.float().to(engine.device) if engine.device.type != "cpu" else squares
    dist.all_reduce(summed, group=engine._sharded.flat_groups.data.everyone.group)
    return list(summed.sqrt().float())


def flat_partition(engine: Engine) -> Tensor:
    """This rank's parts of all gradients as one tensor, a copy. Zeros where no step is under way. A collective.

    Shapes:  [elements of this rank's parts], in fp32 for 16-bit parameters.
    """
    found = [part for parts in averaged_gradients(engine).values() for part in parts]
    if found:
        return torch.cat(found)
    masters = engine._parts.updater.masters
    spans = [part for master in masters for item in master.items for part in item.parts]
    return torch.zeros(sum(part.stop - part.start for part in spans), device=engine.device)


def leaf_parameters(engine: Engine) -> dict[nn.Module, list[nn.Parameter]]:
    """The trained parameters of each module that `set_z3_leaf_modules` has marked; of the outermost ones."""
    found: dict[nn.Module, list[nn.Parameter]] = {}
    taken: set[int] = set()
    for leaf in get_z3_leaf_modules(engine.module):  # outer modules come first
        own = [one for one in leaf.parameters() if one.requires_grad and id(one) not in taken]
        taken.update(map(id, own))
        if own:
            found[leaf] = own
    return found


def params_of_masters(engine: Engine) -> list[list[nn.Parameter]]:
    """The parameters of which each of the optimizer's tensors has elements, in their order. Nothing is sent."""
    params = {owner.name_of(param): param for param, owner in _trained(engine)}
    items = {id(item.master): item for one in engine._parts.updater.masters for item in one.items}
    tensors = [one for group in engine.optimizer.param_groups for one in group["params"]]
    return [[params[part.name] for part in items[id(one)].parts] for one in tensors]


def accumulated_grads_in_cpu(engine: Engine) -> dict[int, Tensor]:
    """With the optimizer on the host: copies of this rank's gradients of the step so far, by parameter.

    Empty where a step is one micro-batch, as in DeepSpeed, and before the first backward. A collective.
    """
    is_on_host = engine.config.zero_optimization.offload_optimizer.device == "cpu"
    if not is_on_host or engine._accumulation.steps_now == 1:
        return {}
    found: dict[int, Tensor] = {}
    for number, (param, owner) in enumerate(_trained(engine)):
        own = owner.own_grad(param) if owner.holds_grads(param) else _reduced(param, owner)
        if own is not None:
            found[number] = own.to("cpu").flatten()
    return found


def _reduced(param: nn.Parameter, owner: Owner) -> Tensor | None:
    """This rank's part of the sum, times the factor that makes it a mean."""
    stored = owner.grad(param)
    return None if stored is None else stored.local * owner.gradient_factor()


def _trained(engine: Engine) -> Iterator[tuple[nn.Parameter, Owner]]:
    for param in engine.module.parameters():
        owner = find_owner(param)
        if owner is not None and owner.trains(param):
            yield param, owner


def unscale_and_clip_grads(
    self: Any, grad_groups_flat: Iterable[Tensor | list[Tensor]], total_norm: Tensor
) -> None:
    """Divide gradients by `self.loss_scale`, and clip them to `self.clip_grad`; 0 does not clip.

    The engine does this in its update; this is for code that borrows the method.
    Args:
        total_norm: of the gradients with the loss scale, []. One that is not a norm makes gradients 0.
    """
    scale = self.loss_scale
    if self.clip_grad > 0:
        norm = torch.as_tensor(total_norm, dtype=torch.float32)
        norm = norm if norm >= 0 else norm.new_full((), torch.inf)
        scale = scale * max(1.0, float((norm / scale + 1e-6) / self.clip_grad))
    if scale == 1.0:
        return
    for group in grad_groups_flat:
        for grad in group if isinstance(group, list) else [group]:
            grad.data.mul_(1.0 / scale)


__all__ = [
    "accumulated_grads_in_cpu",
    "averaged_gradients",
    "flat_partition",
    "leaf_parameters",
    "norms_of_groups",
    "params_of_masters",
    "unscale_and_clip_grads",
]
