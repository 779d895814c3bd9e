"""Divides a model among ranks: layers over pipeline stages, and each layer over tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, final

from torch import nn

from ...compression.scheme import BuildScheme
from ...ops.comm.collectives import Collectives
from ...ops.comm.exchange import agreeing
from ...ops.comm.mesh_groups import MeshGroups
from ...zero.layout.discover import found_blocks
from ...zero.layout.groups import FlatGroups
from ..config.config import Config
from ..model.arguments import BlockRuns, is_cut, is_part
from ..model.forwards import Rerouted
from ..model.precision import Fp32Tensors, compute_dtype
from .flat_groups import BuildPolicy, Division, build_shard_groups, hosts_of, open_flat_groups

if TYPE_CHECKING:
    from ...experts.cut import Found
    from ...tensor.proof import Proof
    from ...tensor.quiet_runs import Holding
    from ...tensor.slicing import Sliced
    from .experts import ExpertLayers
    from .pipeline import StageModules


@final
@dataclass(frozen=True, eq=False)
class LocalModel:
    """The part of a model that this rank has.

    model, runs: the module and its blocks by stage, as `plan_units` takes them.
    found: the pipeline stage; None without a pipeline.
    sliced, proof: the slices of its layers, and what proves them; None with one tensor rank.
    experts: the layers whose experts are on several ranks; None: there are none.
    groups: of every flat buffer.
    fp32: what stays fp32 in 16-bit training.
    """

    model: nn.Module
    runs: BlockRuns
    found: StageModules | None
    sliced: Sliced | None
    proof: Proof | None
    experts: ExpertLayers | None
    groups: FlatGroups
    fp32: Fp32Tensors

    @property
    def compilable(self) -> list[nn.Module]:
        """What may be compiled alone: blocks, or a model without any. A stage's forward is never the same."""
        blocks = [module for run in self.runs for _, module in run]
        return blocks if blocks or self.found is not None else [self.model]

    def start_proof(self, mesh: MeshGroups, holding: Holding) -> None:
        """Prove the slices in the first forward: after all hooks that gather parameters.

        holding: inside, all parameters of a module are gathered.
        """
        if self.proof is not None and self.sliced is not None:
            self.proof.start(self.sliced, mesh.along("tensor"), mesh.opened, holding)

    def begin(self) -> None:
        """Reroute the forwards of experts."""
        if self.experts is not None:
            self.experts.begin()

    def undo(self) -> None:
        """Give the modules their classes and forwards back."""
        if self.experts is not None:
            self.experts.undo()
        if self.sliced is not None:
            self.sliced.undo()
        if self.proof is not None:
            self.proof.stop()


def divide(
    model: nn.Module,
    config: Config,
    mesh: MeshGroups,
    world: Collectives,
    policy: BuildPolicy,
    scheme: BuildScheme,
) -> LocalModel:
    """Cut the model into pipeline stages, its layers into slices, and its experts. Opens groups: for all ranks.

    scheme: how gradients and parameters are sent.

    Raises:
        UsageError: the model cannot be divided as the config says; before anything is cut where hosts decide.
    """
    hosts = partial(hosts_of, world)
    shard_groups = build_shard_groups(config, mesh.mesh, hosts, is_first=world.rank == 0)
    tensor = mesh.along("tensor") if config.tensor_parallel.size > 1 else None
    found, sliced, proof, plan, experts = None, None, None, None, None
    section, is_built = config.expert_parallel, not is_part(model)
    mixtures: Sequence[Found] = ()
    size, rerouted = 1, Rerouted()
    with agreeing(world, "xds.initialize"):
        runs: BlockRuns = [found_blocks(model, config.zero_optimization.units) if is_built else []]
        fp32 = stay_fp32(model, config) if is_built else None
        if section.enabled and is_built:
            from .experts import plan_experts

            mixtures, size = plan_experts(model, section, mesh.mesh)
            listed = {expert for mixture in mixtures for expert in mixture.experts or ()}
            # ranks call different ones, so none is a unit
            runs = [[block for block in run if block[1] not in listed] for run in runs]
        if tensor is not None:
            from .slices import plan_slices, slice_layers

            plan = plan_slices(model, runs[0], config, {f.experts_name for f in mixtures})
        if is_cut(model, config):
            from .pipeline import cut

            found = cut(model, runs[0], config, mesh)
            model, runs = found.part.module, found.runs
    if section.enabled:
        from .experts import found_in, keep_experts, left_out, plan_stage

        if not is_built:
            mixtures, size = plan_stage(model, section, mesh.mesh, world)
    with agreeing(world, "xds.initialize"):
        if section.enabled:
            mixtures = found_in(model, mixtures)
            rerouted = left_out(mixtures)
        if tensor is not None:
            sliced, proof = slice_layers(model, runs, plan, config, tensor, found, rerouted)
        if section.enabled:
            experts = keep_experts(model, mixtures, size, world.rank)
    stage = config.zero_optimization.stage
    # tensor ranks have other tokens in experts
    is_apart = experts is not None and (size > 1 or tensor is not None)
    division = Division(found, sliced, experts if is_apart else None)
    groups = open_flat_groups(mesh, world, policy, stage, division, scheme, shard_groups)
    fp32 = fp32 or _stay_fp32_in_part(model, config, groups.names, world)
    groups = replace(groups, fp32=fp32.params)
    layers = None
    if experts is not None:
        from .experts import ExpertLayers

        cut_tokens = None if sliced is None else sliced.tokens
        together = {
            f.name: tensor
            for f in mixtures
            if tensor is not None and not (cut_tokens and cut_tokens.of(f.name))
        }
        with agreeing(world, "xds.initialize"):
            layers = ExpertLayers(model, experts, groups, section, together)
    return LocalModel(model, runs, found, sliced, proof, layers, groups, fp32)


def stay_fp32(
    model: nn.Module, config: Config, names: Mapping[int, str] | None = None
) -> Fp32Tensors:
    """What the config keeps in fp32 in 16-bit training.

    names: of parameters, where `model` is a part; see `find_fp32`. Whether patterns match is not checked then.

    Raises:
        UsageError: the config names what is not in the model, or only a part of a layer of torch.
    """
    if compute_dtype(config) is None or not config.data_types.keep_in_fp32_modules:
        return Fp32Tensors()
    from ..model.fp32_modules import find_fp32, refuse_unused

    found = find_fp32(model, config, names)
    if names is None:
        refuse_unused(found, model)
    return found


def _stay_fp32_in_part(
    model: nn.Module, config: Config, names: Mapping[int, str], world: Collectives
) -> Fp32Tensors:
    """The same where each rank has built its own part. For all ranks."""
    with agreeing(world, "xds.initialize"):
        found = stay_fp32(model, config, names)
    if config.data_types.keep_in_fp32_modules:
        from ..model.fp32_modules import refuse_unused_in_parts

        refuse_unused_in_parts(found, world)
    return found


__all__ = ["LocalModel", "divide", "stay_fp32"]
