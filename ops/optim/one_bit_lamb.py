"""1-bit LAMB on flat shards: LAMB, then a direction of a variance that stays, with ratios that follow it.

    frozen    ratio = (mean of the ratios before) * factor
              factor = max of (sqrt(v) + eps) / (sqrt(fresh v) + eps) over the parameter, which changes slowly

Source: Li et al., 1-bit LAMB, 2021, algorithm 1, https://arxiv.org/abs/2104.06069; limits and defaults as in
DeepSpeed. Differs: moments are corrected for their bias, as in LAMB (`bias_correction`); an element whose
variance is 0 does not move, and directions are limited (`most_rates`); messages have a magnitude for each
1024 elements, so momenta are not brought to one scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..flat import moved
from ..kernels.lamb import lamb_apply_
from .adam import new_moments
from .lamb import clamped, lamb_direction
from .one_bit import Moment, OneBitOptimizer, gets_momentum, most_rates
from .part_tables import PartTables
from .scale import Scale
from .shard_optimizer import Item, PartNumbers, Update, World, mark_written

COEFF, FACTOR = "lamb_coeff", "last_factor"  # states, a number for each parameter
FRESH = "exp_avg_sq_fresh"  # the state: the variance that is updated after the freeze


@final
class OneBitLamb(OneBitOptimizer):
    """LAMB whose variance stays after `freeze_step` steps.

    Args:
        params: 1-D fp32 tensors or groups of them.
        bias_correction: divide the moments by 1 - beta^t.
        max_coeff, min_coeff: limits of the ratio |p| / |direction| before the freeze.
        coeff_beta: decay of the mean of these ratios.
        factor_max, factor_min: limits of the factor after the freeze.
        factor_threshold: the most that it changes in a step, relative to the one before.
    """

    is_elementwise = False
    num_states = 3
    part_states = (COEFF, FACTOR)

    def __init__(  # noqa: PLR0913 (the names users of DeepSpeed know)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int | str = 100_000,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        super().__init__(params, defaults, freeze_step, warmup_steps)
        self._tables = PartTables()

    def new_states(self, item: Item) -> dict[str, Any]:
        return {**new_moments(item), COEFF: PartNumbers(), FACTOR: PartNumbers()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which makes plain dicts of the numbers by parameter."""
        super().load_state_dict(state_dict)
        for state in self._states.values():
            for key in self.part_states:
                if key in state:
                    state[key] = PartNumbers(state[key])

    def begin_frozen(self, state: dict[str, Any]) -> None:
        state[FRESH] = state["exp_avg_sq"].clone()

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        moment = self.begin_update(updates, world)
        if moment.frozen_at is None:
            directions, ratios = self._warm_up(updates, scale, world)
        else:
            directions, ratios = self._frozen(updates, scale, world, moment)
        for update, direction in zip(updates, directions, strict=True):
            cuts = self._tables.cuts_of(update.item)
            lr = float(update.group["lr"])
            values = [0.0 if name is None else lr * ratios[name] for name in cuts.names]
            rates = moved(torch.tensor(values, dtype=torch.float32), direction.device)
            lamb_apply_(update.item.master, direction, update.out, cuts.bounds, rates, None)
            mark_written(update)

    # -- before the freeze ------------------------------------------------------------------------------

    def _warm_up(
        self, updates: Sequence[Update], scale: Scale, world: World
    ) -> tuple[list[Tensor], dict[str, float]]:
        """LAMB's directions, each [n], and ratios by parameter. Adds the ratios to their means."""
        items = [update.item for update in updates]
        places = [(self._states[item.master], self._tables.cuts_of(item)) for item in items]
        pairs = [
            lamb_direction(update, *place, scale)
            for update, place in zip(updates, places, strict=True)
        ]
        figures = [norms for _, norms in pairs]
        table = self._tables.over_ranks(updates, figures, world, lambda every: every.sum(0))
        groups = {part.name: update.group for update in updates for part in update.item.parts}
        ratios = {name: clamped(squares, groups[name]) for name, squares in table.items()}
        for update in updates:
            means, beta = self._states[update.item.master][COEFF], update.group["coeff_beta"]
            for part in update.item.parts:
                ratio = ratios[part.name]
                # as in DeepSpeed: 1 stands for a parameter or a direction of zeros
                if ratio != 1.0:
                    means[part.name] = beta * means.get(part.name, 0.0) + (1.0 - beta) * ratio
        return [direction for direction, _ in pairs], ratios

    # -- after it ---------------------------------------------------------------------------------------

    def _frozen(
        self, updates: Sequence[Update], scale: Scale, world: World, moment: Moment
    ) -> tuple[list[Tensor], dict[str, float]]:
        """The directions, each [n], and the ratios by parameter."""
        pairs = [
            self._frozen_direction(update, scale, moment, is_momentum=gets_momentum(update, world))
            for update in updates
        ]
        table = self._tables.over_ranks(updates, [figures for _, figures in pairs], world, _joined)
        ratios: dict[str, float] = {}
        for update in updates:
            state, group = self._states[update.item.master], update.group
            for part in update.item.parts:
                last = state[FACTOR].get(part.name, 1.0)
                now = state[FACTOR][part.name] = _factor(table[part.name], last, group)
                ratios[part.name] = state[COEFF].get(part.name, 0.0) * now
        return [direction for direction, _ in pairs], ratios

    def _frozen_direction(
        self, update: Update, scale: Scale, moment: Moment, *, is_momentum: bool
    ) -> tuple[Tensor, Tensor]:
        """The direction [n]; for each cut the squared norms of the direction without and with decay, and the
        largest (sqrt(v) + eps) / (sqrt(fresh v) + eps), [cuts, 3]."""
        master, group, state = update.item.master, update.group, self._states[update.item.master]
        beta1, beta2 = group["betas"]
        mean, fresh = state["exp_avg"], state[FRESH]
        corrections = moment.corrections(group)
        arrived = update.grad.to(master.dtype) * scale.value
        if is_momentum:
            grad = (arrived - mean * beta1).div_(1.0 - beta1)
            mean.copy_(arrived)
        else:
            grad = arrived
            mean.lerp_(arrived, 1.0 - beta1)
        fresh.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        stays = ~(state["exp_avg_sq"] > 0)
        root = state["exp_avg_sq"].sqrt().mul_(corrections.root).add_(group["eps"])
        seen = (1.0 - beta2**moment.steps) ** -0.5 if group["bias_correction"] else 1.0
        change = root / fresh.sqrt().mul_(seen).add_(group["eps"])
        most = most_rates(group)
        plain = (mean * corrections.mean).div_(root).clamp_(-most, most).masked_fill_(stays, 0.0)
        direction = plain.add(master, alpha=group["weight_decay"]).masked_fill_(stays, 0.0)
        change.masked_fill_(stays, 0.0)
        bounds = self._tables.cuts_of(update.item).starts
        figures = torch.zeros(len(bounds) - 1, 3, dtype=torch.float64, device=master.device)
        for row, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            here = slice(start, stop)
            figures[row, 0] = plain[here].double().square().sum()
            figures[row, 1] = direction[here].double().square().sum()
            figures[row, 2] = change[here].amax()
        return direction, figures


def _joined(every: Tensor) -> Tensor:
    return torch.cat([every[..., :2].sum(0), every[..., 2:].amax(0)], -1)


def _factor(figures: Sequence[float], last: float, group: dict[str, Any]) -> float:
    """The factor of a parameter's ratio from its figures over all ranks, and from the one before."""
    plain, direction, factor = figures[0] ** 0.5, figures[1] ** 0.5, figures[2]
    if group["weight_decay"] and direction:
        share = min(1.0, plain / direction)
        factor = factor * share + 1.0 - share
    factor = min(max(factor, group["factor_min"]), group["factor_max"])
    threshold = group["factor_threshold"]
    return float(min(max(factor, last * (1.0 - threshold)), last * (1.0 + threshold)))


__all__ = ["OneBitLamb"]
