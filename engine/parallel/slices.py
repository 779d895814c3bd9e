"""Cuts the layers of a model over the tensor ranks of an engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, final

from torch import Tensor, nn

from ...ops.comm.collectives import Collectives
from ...tensor.finding import find_plan
from ...tensor.layer_specs import has_specs, keeps_own_plan, read_specs
from ...tensor.plan import ParallelPlan, is_inside, own_plan, read_plan
from ...tensor.proof import Proof
from ...tensor.slicing import Sliced, slice_model
from ...tensor.styles import StyleName
from ...tensor.ties import cut_names, with_head, with_heads, with_ties
from ...tensor.vocabulary import CHECKED_BACKWARDS, check_uses_of_logits
from ...utils.errors import UsageError
from ...zero.core.owners import find_owner
from ..config.config import Config
from ..model.arguments import BlockRuns, is_part
from ..model.forwards import Rerouted
from ..parts import LossCheck

if TYPE_CHECKING:
    from .pipeline import StageModules

Blocks = Sequence[tuple[str, nn.Module]]


def plan_slices(
    model: nn.Module, blocks: Blocks, config: Config, apart: Collection[str] = ()
) -> ParallelPlan | None:
    """How the layers of the whole `model` are cut; None: each rank builds its own layers, later.

    apart: modules that stay whole, whatever a plan says.

    Raises:
        UsageError: there is no plan, or it does not fit the model.
    """
    section = config.tensor_parallel
    if is_part(model):
        return None
    if any(find_owner(param) is not None for param in model.parameters()):
        raise UsageError(
            f"tensor_parallel.tp_size = {section.size}: the model was built in xds.zero.Init, which spreads "
            "every parameter over all ranks; build it without"
        )
    return _plan(model, blocks, config, apart, is_stage=False)


def _plan(
    model: nn.Module, blocks: Blocks, config: Config, apart: Collection[str], *, is_stage: bool
) -> ParallelPlan:
    """DeepSpeed's layer_specs, else the plan of the config, else the model's own, else one that is found."""
    section = config.tensor_parallel
    specs = section.partition_config
    if specs and has_specs(specs):
        own = own_plan(model, apart) if keeps_own_plan(specs) else {}
        ways = read_specs(specs, own, model, is_part=is_stage)
    elif section.plan is not None:
        ways = read_plan(section.plan, model, apart, is_part=is_stage)
    else:
        ways = own_plan(model, apart) or ({} if is_stage else find_plan(model, blocks))
    ways = {name: way for name, way in ways.items() if not is_inside(name, apart)}
    if not ways and not is_stage:
        raise UsageError(
            f"tensor_parallel: {type(model).__name__} has no plan that says how its layers are cut; write "
            'one in tensor_parallel.plan, as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        )
    if section.vocab_parallel_lm_head:
        names = [name for name, _ in blocks]
        ways = with_heads(ways) if is_stage else with_head(ways, model, names)
    check_tokens(ways, config)
    return with_ties(ways, model)


def slice_layers(
    model: nn.Module,
    runs: BlockRuns,
    plan: ParallelPlan | None,
    config: Config,
    group: Collectives,
    found: StageModules | None,
    rerouted: Rerouted,
) -> tuple[Sliced, Proof]:
    """Keep this rank's slices of the layers that this pipeline stage has. Sends nothing.

    Args:
        plan: from `plan_slices`, of the whole model.
        group: the tensor ranks.
        found: the pipeline stage.
        rerouted: modules that stay as they are, and are not proven.

    Returns:
        the slices, and what proves them in the first forward.

    Raises:
        UsageError: the layers cannot be cut over so many ranks.
    """
    own = ways_here(model, runs, plan, config, found, rerouted.whole)
    blocks = [block for run in runs for block in run]
    proof = Proof(model, blocks, own, rerouted.whole, rerouted.stand_ins)
    overlaps = config.tensor_parallel.tp_overlap_comm
    sliced = slice_model(model, own, group, overlaps=overlaps, blocks=runs)
    if plan is not None and found is not None:
        sliced.names = cut_names(plan, found.part.aliases)
    return sliced, proof


def check_tokens(ways: ParallelPlan | None, config: Config) -> None:
    """
    Raises:
        UsageError: settings that need whole activations in the blocks, whose tokens `ways` cut.
    """
    if not any(way.name is StyleName.TOKENS for way in (ways or {}).values()):
        return
    wrong = {
        "compile.enabled": config.compile.enabled,
        "activation_checkpointing.partition_activations": (
            config.activation_checkpointing.enabled
            and config.activation_checkpointing.partition_activations
        ),
    }
    for setting in [setting for setting, is_set in wrong.items() if is_set]:
        raise UsageError(
            f'tensor_parallel.plan has "sequence_parallel", so blocks have the tokens of their rank: it does '
            f"not work with {setting} = true; set that to false, or take the word out of the plan"
        )


def ways_here(
    model: nn.Module,
    runs: BlockRuns,
    plan: ParallelPlan | None,
    config: Config,
    found: StageModules | None,
    apart: Collection[str] = (),
) -> ParallelPlan:
    """How the layers are cut that this pipeline stage has; the arguments are those of `slice_layers`."""
    names = {
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    }
    if plan is not None:  # stand-ins for modules of other stages have no parameters
        return {name: way for name, way in plan.items() if name in names}
    blocks = [block for run in runs for block in run]
    tied = set() if found is None else _tied(found)
    own: ParallelPlan = {}
    for name, way in _plan(model, blocks, config, apart, is_stage=True).items():
        params = model.get_submodule(name).parameters()
        if name in names and not any(id(param) in tied for param in params):
            own[name] = way
    return own


def _tied(found: StageModules) -> set[int]:
    """id of every parameter that several stages of a PipelineModule hold; they stay whole."""
    return {key for key, name in found.part.names.items() if name in found.part.shared}


@final
class LogitsCheck(LossCheck):
    """With vocab_parallel_lm_head: looks at how the first losses use logits, whose columns ranks share."""

    def __init__(self) -> None:
        self._num_unchecked = CHECKED_BACKWARDS

    def check(self, loss: Tensor) -> None:
        if self._num_unchecked and check_uses_of_logits(loss):
            self._num_unchecked -= 1


__all__ = ["LogitsCheck", "check_tokens", "plan_slices", "slice_layers", "ways_here"]
