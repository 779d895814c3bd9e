"""0/1 Adam on flat shards: its variance sees few steps, and later its ranks step alone between messages.

    before the freeze   the variance is updated       exact gradients
                        the other steps               one bit per element: the momentum; stages 1, 2: gradients
    after it            every step synchronises       the momentum, one bit per element: as 1-bit Adam
                        local steps                   nothing; u += rate m, p -= rate m / (sqrt(v) + eps)
    a synchronisation   mean(u), one bit per element  p = anchor - mean(u) / (sqrt(v) + eps), m = mean(u)/rates

Source: Lu, Li, Zhang, De Sa, He, 0/1 Adam, 2022, algorithm 1, https://arxiv.org/abs/2202.06009; intervals as in
DeepSpeed. Differs: moments are corrected for their bias, as in Adam (`bias_correction`), the variance by the
steps that it has seen; weight decay is decoupled, and is no part of u; errors are kept at the freeze; from the
first step of one bit on an element whose variance is 0 does not move, and none by more than Adam would
(`most_rates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .adam import AdamRule
from .edits import take_edits
from .frozen_step import frozen_step
from .intervals import Intervals, Limits
from .one_bit import Carried, Moment, OneBitOptimizer, gets_momentum, most_rates
from .scale import Scale
from .shard_optimizer import Flat, Item, Update, World

# states between two synchronisations: the values at the last one, the sum of rate * momentum, and numbers:
# the sum of the rates, and the product of what weight decay leaves
ANCHOR, SUM, RATES, KEPT = "anchor", "momentum_sum", "rate_sum", "decay_product"
LEAST_RATE = 1e-20  # so that the mean momentum of steps with a rate of 0 is defined


@final
class ZeroOneAdam(OneBitOptimizer):
    """Adam whose variance sees fewer and fewer steps, and none after `var_freeze_step`; then with local steps.

    Args:
        params: 1-D fp32 tensors or groups of them.
        var_update_scaler: the interval between updates of the variance doubles after so many of them.
        local_step_scaler: the interval between synchronisations doubles after so many steps.
        local_step_clipper: the longest of these intervals; 1: every step synchronises.
        bias_correction: divide the moments by 1 - beta^t.
    """

    takes_edits = True

    def __init__(  # noqa: PLR0913 (the names users of DeepSpeed know)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        var_freeze_step: int = 100_000,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, var_freeze_step, warmup_steps)
        self._limits = Limits(var_update_scaler, local_step_scaler, local_step_clipper)
        self._rule = AdamRule(adam_w_mode=True)
        self.intervals = Intervals()
        self._items: dict[Tensor, Item] = {}

    # -- what a step is ---------------------------------------------------------------------------------

    def states_changed(self) -> None:
        super().states_changed()
        found = [int(number) for number in self.largest_of(*Intervals.names())]
        self.intervals = Intervals(*found) if any(found) else Intervals()

    @property
    def variance_steps(self) -> int:
        return self.intervals.variance_steps

    @property
    def carried(self) -> Carried:
        if self.is_frozen:
            return Carried.NOTHING if self._is_local else Carried.MOMENTUM
        if self.intervals.updates_variance(self._steps + 1):
            return Carried.EXACT
        # owners of a part have its momentum alone: exact steps would not bring it to the others
        return Carried.GRADIENT if self.world.is_sharded else Carried.MOMENTUM

    @property
    def _is_local(self) -> bool:
        """After the freeze: the ranks take the next step apart."""
        if self.averager is None or self.world.is_sharded or self.world.is_alone:
            return False
        return self.intervals.local_step_interval > 1

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """As in the base class. Counts the intervals."""
        if self.is_frozen:
            self.intervals.count_frozen(self._limits, is_local=self._is_local)
        else:
            self.intervals.count_before_freeze(self._steps + 1, self._limits)
        super().step(closure)
        self._write_intervals()

    def _write_intervals(self) -> None:
        for state in self._states.values():
            state.update(self.intervals.as_state())

    @torch.no_grad()
    def update(self, updates: Sequence[Update], scale: Scale, world: World) -> None:
        steps, carried = self.begin_update(updates, world).steps, self.carried
        moment = Moment(steps, self.variance_steps + (carried is Carried.EXACT))
        for update in updates:
            state = self._states[update.item.master]
            self._items[update.item.master] = update.item
            if carried is Carried.EXACT:
                self._variance_step(update, scale, world, moment)
            elif carried is Carried.NOTHING:
                self._local_step(update, scale, world, moment)
            else:
                is_momentum = carried is Carried.MOMENTUM and gets_momentum(update, world)
                frozen_step(update, state, scale, moment, is_momentum=is_momentum)
                if not self.is_frozen:
                    # what messages bring there is noise, and the next exact step would divide it by eps
                    state["exp_avg"].masked_fill_(state["exp_avg_sq"] == 0, 0.0)
        if carried is Carried.NOTHING and self.intervals.ends_now:
            self._join([update.item for update in updates], self.intervals.apart_steps + 1)
            for update in updates:
                if update.out is not None:
                    update.out.copy_(update.item.master)

    def _variance_step(self, update: Update, scale: Scale, world: World, moment: Moment) -> None:
        """Adam, with a variance that is corrected for the steps that it has seen."""
        state = self._states[update.item.master]
        if moment.frozen_at == moment.steps:
            self._rule.step(update, state, scale, world)
            return
        # the momentum has noise of one-bit steps: the variance sees this gradient, then a step of limited size
        grad, beta2 = update.grad.float() * scale.value, update.group["betas"][1]
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        frozen_step(update, state, scale, moment, is_momentum=False)

    # -- local steps ------------------------------------------------------------------------------------

    def _local_step(self, update: Update, scale: Scale, world: World, moment: Moment) -> None:
        """A step with this rank's gradients, which stand for those of all."""
        master, group, state = update.item.master, update.group, self._states[update.item.master]
        if not self.intervals.apart_steps:
            if update.takes_edits and update.out is not None:
                take_edits(master, update.out)
            state.update(
                {ANCHOR: master.clone(), SUM: torch.zeros_like(master), RATES: 0.0, KEPT: 1.0}
            )
        num_ranks = world.flat_of(update.item).collectives.world_size
        frozen_step(update, state, Scale(scale.value * num_ranks), moment, is_momentum=False)
        lr = float(group["lr"])
        rate = max(lr * moment.corrections(group).mean, LEAST_RATE)
        state[SUM].add_(state["exp_avg"], alpha=rate)
        state[RATES] += rate
        state[KEPT] *= 1.0 - lr * group["weight_decay"]

    @property
    def is_apart(self) -> bool:
        return self.intervals.apart_steps > 0

    @torch.no_grad()
    def synchronise(self) -> None:
        for items in self._by_flat():
            self._join(items, self.intervals.apart_steps)
        self._end_interval()

    @torch.no_grad()
    def average_exactly(self) -> None:
        assert self.averager is not None
        for items in self._by_flat():
            flat = self.world.flat_of(items[0])
            for tensors in (
                [item.master for item in items],
                [self._states[item.master]["exp_avg"] for item in items],
            ):
                values = _joined(flat, items, tensors)
                self.averager.average_exactly(flat.index, values)
                for item, tensor in zip(items, tensors, strict=True):
                    tensor.copy_(values[item.start : item.start + tensor.numel()])
            for item in items:
                _forget(self._states[item.master])
                torch.autograd.graph.increment_version(item.master)
        self._end_interval()

    def _by_flat(self) -> Iterator[list[Item]]:
        """All items, those of one flat buffer together."""
        for flat in self.world.flats:
            found = [item for item in self._items.values() if item.flat == flat.index]
            if found:
                yield found

    def _end_interval(self) -> None:
        self.intervals.apart_steps = 0
        self._write_intervals()

    def _join(self, items: Sequence[Item], num_steps: int) -> None:
        """The ranks take the mean of what they did in `num_steps` local steps. items: of one flat buffer."""
        assert self.averager is not None
        flat = self.world.flat_of(items[0])
        states = [self._states[item.master] for item in items]
        # a sum over the mean rate: what is not sent of it has the unit of a momentum
        sums = [state[SUM] * (num_steps / state[RATES]) for state in states]
        values = _joined(flat, items, sums)
        self.averager.average(flat.index, values, num_steps)
        for item, state in zip(items, states, strict=True):
            group = self.param_groups[item.group]
            mean = values[item.start : item.start + item.master.numel()]
            root = Moment(1, self.variance_steps).corrections(group).root
            variance, anchor = state["exp_avg_sq"], state[ANCHOR]
            most = num_steps * most_rates(group)
            change = mean / variance.sqrt().mul_(root).add_(group["eps"])
            change.clamp_(-most, most)
            moved = anchor * state[KEPT] - change * (state[RATES] / num_steps)
            item.master.copy_(torch.where(variance > 0, moved, anchor))
            state["exp_avg"].copy_(mean / num_steps)
            _forget(state)
            torch.autograd.graph.increment_version(item.master)


def _joined(flat: Flat, items: Sequence[Item], tensors: Sequence[Tensor]) -> Tensor:
    """A vector of the whole `flat` with the `tensors` of `items`, and zeros elsewhere."""
    values = torch.zeros(flat.numel, dtype=torch.float32, device=tensors[0].device)
    for item, tensor in zip(items, tensors, strict=True):
        values[item.start : item.start + tensor.numel()] = tensor
    return values


def _forget(state: dict[str, Any]) -> None:
    for key in (ANCHOR, SUM, RATES, KEPT):
        state.pop(key, None)


__all__ = ["ZeroOneAdam"]
