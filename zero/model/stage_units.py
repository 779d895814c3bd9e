"""The units and gradients of each pipeline stage that this rank has.

A rank may have several stages (chunks). The root unit holds what is outside of all blocks: its gradients may
come from the first and from the last of them, so they are reduced after the last backward of a step. What
several ranks share is reduced at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import nn

from ..core.grad_bucket import GradBucket
from ..core.reduction import Scope
from ..core.unit import Unit
from .sharded_model import ShardedModel


@final
class StageUnits:
    """Gathers and reduces one stage at a time."""

    def __init__(
        self, sharded: ShardedModel, stage_of: Mapping[nn.Module, int], max_live_numel: int
    ) -> None:
        """
        Args:
            stage_of: block -> its stage, for the blocks of this rank.
            max_live_numel: the most parameters that may be gathered at once.
        """
        self._sharded = sharded
        self._root = sharded.units[-1]
        self._shared = frozenset(g for _, _, g in sharded.trainable if g.group.is_shared)
        self._units: dict[int, list[Unit]] = {stage: [] for stage in stage_of.values()}
        for unit in sharded.units[:-1]:
            self._units[stage_of[unit.modules[0]]].append(unit)
        numel = {stage: sum(u.most_numel for u in units) for stage, units in self._units.items()}
        self._may_hold = sharded.policy.shards_params
        self.holds_all = self._root.most_numel + sum(numel.values()) <= max_live_numel
        self.holds_one = self._root.most_numel + max(numel.values(), default=0) <= max_live_numel

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each unit but the root, by its name."""
        return {unit.name: stage for stage, units in self._units.items() for unit in units}

    # -- parameters -------------------------------------------------------------------------------------

    def publish_shared(self) -> None:
        """Gather the new values of what several stages share. For all ranks, before a run.

        With overlap_step an update ends under the next forward. A stage that waited there for a later stage
        would wait for ever: that one waits for its activations.
        """
        shared = [
            (g.group.number, flat) for _, flat, g in self._sharded.trainable if g.group.is_shared
        ]
        flats = [flat for _, flat in sorted(shared, key=lambda pair: pair[0])]
        for flat in flats:
            flat.start_unshard()
        for flat in flats:
            flat.wait()

    def hold(self, stage: int) -> None:
        """Gather the units of `stage`, and keep them until `release`."""
        if self._may_hold and self.holds_one:
            for unit in [self._root, *self._units.get(stage, ())]:
                unit.hold()

    def release(self, stage: int) -> None:
        """Drop the units of `stage`."""
        if self._may_hold and self.holds_one:
            for unit in self._units.get(stage, ()):
                unit.release()

    def release_all(self) -> None:
        """Drop every unit, also after an error."""
        for unit in self._sharded.units:
            if unit.is_held:
                unit.release()

    # -- gradients --------------------------------------------------------------------------------------

    def scope(self, stage: int, *, reduces: bool) -> Scope:
        """Of a backward through `stage`; `reduces`: no other one follows in this step."""
        of_stage = self._grads(stage)
        computed = of_stage | self._shared.union(self._root.grads)
        return Scope(computed, of_stage if reduces else frozenset())

    def reduce(self, stage: int) -> None:
        """Start to reduce what the backward passes of `stage` have held back."""
        self._sharded.reduction.start_held(self._grads(stage))

    def reduce_root(self) -> None:
        """Start to reduce the root unit, without what other stages share."""
        self._sharded.reduction.start_held([g for g in self._root.grads if not g.group.is_shared])

    def _grads(self, stage: int) -> frozenset[GradBucket]:
        units = self._units.get(stage, ())
        return frozenset(grads for unit in units for grads in unit.grads).difference(self._shared)


__all__ = ["StageUnits"]
