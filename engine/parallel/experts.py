"""Puts the experts of a model on different ranks: finds them, keeps this rank's, and reroutes their calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import gcd
from typing import Any, final

import torch
from torch import nn

from ...experts.adapters import add_adapters, outer_modules
from ...experts.balance import Balance, find_bias
from ...experts.block import ExpertBlock, block_stand_in, rerouting
from ...experts.config import ExpertParallel
from ...experts.conventions import find_convention
from ...experts.cut import (
    Cut,
    Found,
    check_choices,
    check_found,
    check_shared,
    check_size,
    find_experts,
    fitting_size,
    keep_part,
    mark_cut,
    plan_cut,
)
from ...experts.layer import ExpertLayer, Forward, stand_in
from ...experts.turns import Turns
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agreeing
from ...ops.comm.opening import open_collectives
from ...ops.mesh import Mesh
from ...utils.errors import UsageError, XdsError
from ...zero.construction.slices import SliceStore
from ...zero.core.owners import find_owner
from ...zero.layout.groups import FlatGroups
from ..model.forwards import Rerouted, replace_forwards
from ..parts import UnevenForwards

log = logging.getLogger("xds")


def plan_experts(model: nn.Module, section: ExpertParallel, mesh: Mesh) -> tuple[list[Found], int]:
    """The experts of `model`, which is whole, and how many ranks share those of a layer.

    Raises:
        UsageError: the model has no experts, or they cannot be shared as the config says; or a block does
            something else with its experts than what is known.
    """
    found = _proven(model, section)
    check_found(model, found, section.setting)
    num_ranks = mesh.size // mesh.pipe
    size = section.autoep_size
    if size in (0, "auto"):
        size = fitting_size(found, num_ranks)
    check_size(found, int(size), num_ranks, section.setting)
    check_choices(model, found, section.setting)
    return found, int(size)


def plan_stage(
    model: nn.Module, section: ExpertParallel, mesh: Mesh, world: Collectives
) -> tuple[list[Found], int]:
    """The same where each rank has built its own layers. All stages have one size. **Collective.**

    Raises:
        UsageError: as above; on all ranks.
    """
    with agreeing(world, "xds.initialize"):
        found = _proven(model, section, is_part=True)
    own = gcd(*(f.num_experts for f in found))  # 0: no experts here
    sizes = world.gather_small(torch.tensor([own], device=world.device), what="sizes of mixtures")
    num_ranks = mesh.size // mesh.pipe
    size = section.autoep_size
    if size in (0, "auto"):
        size = gcd(num_ranks, *sizes.flatten().tolist())
    with agreeing(world, "xds.initialize"):
        if not sizes.any():
            check_found(model, found, section.setting)
        if found:
            check_size(found, int(size), num_ranks, section.setting)
    return found, int(size)


def _proven(model: nn.Module, section: ExpertParallel, *, is_part: bool = False) -> list[Found]:
    """The experts of `model`, with the conventions of blocks.

    A list beside a matrix with as many rows may be anything: in a model with modules of experts such a block
    is left whole where no convention fits it, unless the config names it.
    """
    found = find_experts(model, section, is_part=is_part)
    model_config = getattr(model, "config", None)
    is_needed = section.moe_layer_pattern is not None or all(f.block is not None for f in found)
    proven = []
    for mixture in found:
        try:
            if mixture.block is not None:
                convention = find_convention(mixture.block, section, model_config)
                mixture = replace(mixture, convention=convention)
            proven.append(mixture)
        except UsageError as error:
            if is_needed:
                raise
            log.info("%s is left whole: %s", mixture.name, error)
    return proven


def keep_experts(model: nn.Module, found: Sequence[Found], size: int, rank: int) -> Cut:
    """Keep the experts of `rank`, of `size` ranks. found: in `model`. For all ranks.

    Raises:
        UsageError: an adapter has no part for each expert.
    """
    cut = plan_cut(found, size)
    if size > 1:
        check_shared(model, cut, f"expert_parallel.autoep_size = {size}")
    add_adapters(model, cut)
    if size > 1:
        mark_cut(cut)
    for param in cut.params():
        owner = find_owner(param)
        if isinstance(owner, SliceStore) and size > 1:  # one after the other is whole
            owner.unshard(param)
        keep_part(param, cut.slices[id(param)][rank % size])
    return cut


def left_out(found: Sequence[Found]) -> Rerouted:
    """What the slices of tensor ranks leave as it is."""
    forwards = {
        f.name: stand_in
        if f.block is None or f.convention is None
        else block_stand_in(f.block, f.convention)
        for f in found
    }
    return Rerouted(frozenset(f.experts_name for f in found), forwards)


def found_in(model: nn.Module, found: Sequence[Found]) -> list[Found]:
    """Those of `found`, in a whole model, that are in its part `model`, with their names there."""
    names = {module: name for name, module in model.named_modules()}
    return [replace(f, name=names[f.module]) for f in found if f.module in names]


@final
class ExpertLayers(UnevenForwards):
    """The modules of experts of one engine, rerouted from `begin` to `undo`.

    balance: the tokens of each expert. params: id of each parameter of experts.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        groups: FlatGroups,
        section: ExpertParallel,
        together: Mapping[str, Collectives],
    ) -> None:
        """
        together: by the name of a module, ranks that call it with the same tokens.

        Raises:
            UsageError: the section evens out tokens, and a router has no bias.
        """
        group = _group_of(cut, groups)
        self._modules = [f.module for f in cut.found]
        self._turns = Turns(group, [f.name for f in cut.found])
        self.params = frozenset(map(id, cut.params()))
        self.layers = [
            ExpertLayer(
                f, number, group, self._turns, section.setting, together.get(f.name), section.chunks
            )
            for number, f in enumerate(cut.found)
        ]
        self._rerouted = [
            rerouting(f, layer, section.setting)
            for f, layer in zip(cut.found, self.layers, strict=True)
        ]
        coefficient, biases = section.load_balance_coeff, []
        if coefficient:
            biases = [find_bias(model, f.experts_name, f.num_experts) for f in cut.found]
        self.balance = Balance(self.layers, groups.world, biases, coefficient, groups.mesh.pipe)
        outer = outer_modules(model)
        self._callers = [
            r.call_experts if isinstance(r, ExpertBlock) else outer.get(f.module, f.module)
            for r, f in zip(self._rerouted, cut.found, strict=True)
        ]
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Reroute the forward of each module."""
        self._undo = [
            replace_forwards([module], layer.rerouted)
            for module, layer in zip(self._modules, self._rerouted, strict=True)
        ]

    def undo(self) -> None:
        """Give the modules their own forward back. Where this rank has some experts only, it is refused."""
        for each in self._undo:
            each()
        self._undo = []
        if self.layers and self.layers[0].num_local < self.layers[0].num_experts:
            replace_forwards(self._modules, _refused)

    @contextmanager
    def running(
        self, autocast: Callable[[], AbstractContextManager[None]], *, streams: bool
    ) -> Iterator[None]:
        """See `UnevenForwards.running`. A rank that is done calls the layers of the others.

        Raises:
            UsageError: forwards gather parameters, which waits for other ranks than an exchange of tokens.
        """
        if streams and self._turns.has_ranks:
            raise UsageError(
                "unequal numbers of forwards, with experts on several ranks and stage 3: forwards would gather "
                "parameters and exchange tokens, each for other ranks; use engine.generating() with memory for "
                "all parameters, run equal numbers of forwards, or set zero_optimization.stage to 2"
            )
        if not self._turns.open():
            yield
            return
        try:
            yield
        except XdsError:  # of a message: the other ranks have it as well
            self._turns.close()
            raise
        finally:
            try:
                with torch.no_grad(), autocast():
                    for number, *inputs in self._turns.of_others():
                        self._callers[number](*inputs)
            finally:
                self._turns.close()


def _refused(forward: Forward) -> Forward:
    """A forward in place of a module's own, after the engine."""

    def refuse(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"{type(module).__name__} has this rank's experts only, and engine.destroy() has ended their "
            "exchange; call the model before, or load engine.state_dict() into a new model"
        )

    return refuse


def _group_of(cut: Cut, groups: FlatGroups) -> Collectives:
    """The ranks that share the experts."""
    slices = next((groups.slices[key] for key in cut.slices if key in groups.slices), None)
    return open_collectives(None, groups.world.device) if slices is None else slices.group


__all__ = [
    "ExpertLayers",
    "found_in",
    "keep_experts",
    "left_out",
    "plan_experts",
    "plan_stage",
]
