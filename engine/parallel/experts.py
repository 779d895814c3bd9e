"""Puts the experts of a model on different ranks: finds them, keeps this rank's, and reroutes their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from ...experts.balance import Balance, find_bias
from ...experts.config import ExpertParallel
from ...experts.cut import Cut, check_size, cut_experts, find_experts, fitting_size
from ...experts.layer import ExpertLayer
from ...ops.comm.collectives import Collectives
from ...ops.comm.opening import open_collectives
from ...ops.mesh import Mesh
from ...zero.layout.groups import FlatGroups
from ..model.forwards import replace_forwards


def num_expert_ranks(model: nn.Module, section: ExpertParallel, mesh: Mesh) -> int:
    """How many ranks share the experts of each layer of `model`, which is whole.

    Raises:
        UsageError: the model has no experts, or they cannot be shared as the config says.
    """
    found = find_experts(model, section.expert_pattern)
    num_ranks = mesh.size // mesh.pipe
    size = section.autoep_size
    if size in (0, "auto"):
        size = fitting_size(found, num_ranks)
    check_size(found, int(size), num_ranks, section.setting)
    return int(size)


def keep_experts(
    model: nn.Module, section: ExpertParallel, size: int, mesh: Mesh, rank: int
) -> Cut:
    """Keep the experts of `rank` in `model`, which may be a pipeline stage."""
    found = find_experts(model, None if mesh.pipe > 1 else section.expert_pattern)
    return cut_experts(found, size, rank % size)


@final
class ExpertLayers:
    """The modules of experts of one engine, rerouted from `begin` to `undo`.

    balance: the tokens of each expert.
    """

    def __init__(
        self, model: nn.Module, cut: Cut, groups: FlatGroups, section: ExpertParallel
    ) -> None:
        """
        Raises:
            UsageError: the section evens out tokens, and a router has no bias.
        """
        group = _group_of(cut, groups)
        self._modules = [one.module for one in cut.found]
        self.layers = [
            ExpertLayer(one.name, one.num_experts, group, section.setting) for one in cut.found
        ]
        coefficient, biases = section.load_balance_coeff, []
        if coefficient:
            biases = [find_bias(model, one.name, one.num_experts) for one in cut.found]
        self.balance = Balance(self.layers, groups.world, biases, coefficient)
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Reroute the forward of each module."""
        self._undo = [
            replace_forwards([module], layer.rerouted)
            for module, layer in zip(self._modules, self.layers, strict=True)
        ]

    def undo(self) -> None:
        """Give the modules their own forward back; parameters stay those of this rank's experts."""
        for each in self._undo:
            each()
        self._undo = []


def _group_of(cut: Cut, groups: FlatGroups) -> Collectives:
    """The ranks that share the experts."""
    slices = next((groups.slices[key] for key in cut.slices if key in groups.slices), None)
    return open_collectives(None, groups.world.device) if slices is None else slices.group


__all__ = ["ExpertLayers", "keep_experts", "num_expert_ranks"]
