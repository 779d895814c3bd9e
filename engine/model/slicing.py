"""Cuts the layers of a model over the tensor ranks of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...ops.comm.mesh_groups import AxisGroups
from ...tensor.plan import Word, is_linear, read_plan
from ...tensor.proof import Proof
from ...tensor.slicing import Sliced, slice_model
from ...utils.errors import UsageError
from ...zero.access.owners import find_owner
from ..config.config import Config
from .pipelining import Runs, is_part

Plan = Mapping[str, Word]


def plan_slices(model: nn.Module, config: Config, *, has_weights: bool) -> Plan | None:
    """How the layers of the whole `model` are cut; None: not known yet, or there is one tensor rank.

    Raises:
        UsageError: there is no plan, or it does not fit the model.
    """
    section = config.tensor_parallel
    if section.size == 1 or is_part(model):
        return None
    if has_weights:
        raise UsageError(
            f"weights= with tensor_parallel.tp_size = {section.size} is not supported yet: load the weights "
            "into the model before xds.initialize"
        )
    if any(find_owner(param) is not None for param in model.parameters()):
        raise UsageError(
            f"tensor_parallel.tp_size = {section.size}: the model was built in xds.zero.Init, which spreads "
            "every parameter over all ranks; build it without"
        )
    return read_plan(section.plan, model)


def slice_layers(
    model: nn.Module,
    runs: Runs,
    plan: Plan | None,
    config: Config,
    mesh: AxisGroups,
) -> tuple[Sliced, Proof | None]:
    """Keep this rank's slices of the layers that this pipeline stage has. For all ranks.

    Returns:
        the slices, and what proves them in the first forward; None where nothing is cut.

    Raises:
        UsageError: the layers cannot be cut over so many ranks.
    """
    if config.tensor_parallel.size == 1:
        return Sliced(), None
    own = words_here(model, plan, config)
    proof = Proof([block for run in runs for block in run], list(own))
    return slice_model(model, own, mesh.along("tensor")), proof


def words_here(model: nn.Module, plan: Plan | None, config: Config) -> Plan:
    """How the layers are cut that this pipeline stage has; `plan` as in `slice_layers`."""
    if plan is None:
        plan = read_plan(config.tensor_parallel.plan, model, is_part=True)
    modules = dict(model.named_modules())
    return {
        name: word
        for name, word in plan.items()
        if name in modules and (word is Word.PARTIAL or is_linear(modules[name]))
    }


__all__ = ["plan_slices", "slice_layers", "words_here"]
