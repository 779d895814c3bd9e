"""Cuts a plain model with one list of blocks: each stage runs the model's own forward.

Modules of other stages become stand-ins under the same names. `stage_runner.py` says what each call does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from ...utils.errors import UsageError
from ..inputs import kind
from ..partition import Ends, partition_layers, stage_of_layer
from .costs import size_of, sum_of
from .dtype_sync import DtypeSync, ZeroParameter
from .meta_copies import meta_copy
from .names import names_of, names_of_part
from .part import Block, Flow, Names, Part, StagePlacement
from .stage_runner import ModuleRole, Outside, OwnModule, StageRunner
from .stand_ins import CallInterceptor, StandIn
from .surroundings import FIRST, LAST, OuterModules, find_surroundings
from .zeros import ZeroOutputs

_COLLECTED = {
    "output_hidden_states": "hidden states of all blocks",
    "output_attentions": "attentions of all blocks",
    "output_router_logits": "router logits of all blocks",
}


@final
@dataclass(frozen=True)
class EmbeddingAndHead:
    """Names of modules outside of the blocks, as globs; empty: found from the model."""

    first: Sequence[str] = field(default=())
    last: Sequence[str] = field(default=())


@final
class PlainModelPart(Part):
    """This rank's part of a model with one list of blocks."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        placement: StagePlacement,
        rank: int,
        partition: str | Sequence[int] | None,
        sides: EmbeddingAndHead,
    ) -> None:
        outline = outline_model(model, blocks, placement, partition, sides)
        around, stage_of, roles = outline.around, outline.stage_of, outline.roles
        last_stage = placement.num_stages - 1
        here = set(placement.stages_of(rank))
        held = [model.get_submodule(name) for name, role in roles.items() if role.stages & here]
        self._dtype_sync = DtypeSync(p for module in held for p in module.parameters())
        self._runner = StageRunner(placement.num_stages, self._dtype_sync)
        self._interceptor = CallInterceptor(self._runner)
        self._replace_modules(model, roles, placement.stages_of(rank))
        if not {0, last_stage} & set(placement.stages_of(rank)):
            self._replace_parameters(around)
        own_blocks = tuple(
            Block(name, module, stage)
            for (name, module), stage in zip(blocks, stage_of, strict=True)
            if stage in placement.stages_of(rank)
        )
        inside = {module for block in own_blocks for module in block.module.modules()}
        outside = [module for module in model.modules() if module not in inside]
        self._runner.outside = Outside(outside, placement.stages_of(rank))
        super().__init__(model, own_blocks, names_of_part(outline.whole, model, outline.holders))

    def run(self, stage: int, batch: Any, arrived: Flow | None, micro_batch: int) -> Any:
        _check_batch(batch)
        self._dtype_sync.follow(batch)
        way = (kind(batch), self.module.training, torch.is_grad_enabled())
        return self._runner.run(
            stage, micro_batch, arrived, lambda: _call_with(self.module, batch), way
        )

    def recomputing(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        return self._runner.recomputing(stage, micro_batch)

    def release(self, stage: int, micro_batch: int) -> None:
        self._runner.release(stage, micro_batch)

    def restore(self) -> None:
        self._interceptor.restore()

    def _replace_modules(
        self, model: nn.Module, roles: Mapping[str, ModuleRole], stages: Sequence[int]
    ) -> None:
        """Put stand-ins in place of what this rank does not run, and direct the calls of the rest."""
        replaced: dict[int, StandIn] = {}
        for name, role in roles.items():
            module = model.get_submodule(name)
            if role.stages & set(stages):
                is_everywhere = len(stages) == 1 and len(role.stages) == 1
                if is_everywhere and not (role.is_block or role.is_head):
                    continue  # each call of it is real
                zeros = None if is_everywhere else self._zeros_of(module, role)
                own_module = OwnModule(module, role, zeros)
                if role.is_block:
                    self._runner.own_blocks.append(own_module)
                self._interceptor.intercept(own_module)
            else:
                zeros = self._zeros_of(module, role)
                replaced[id(module)] = StandIn(self._runner, role, zeros)
        for parent in list(model.modules()):
            for child_name, child in parent._modules.items():
                if child is not None and id(child) in replaced:
                    parent._modules[child_name] = replaced[id(child)]

    def _zeros_of(self, module: nn.Module, role: ModuleRole) -> ZeroOutputs:
        zeros = ZeroOutputs(meta_copy(module), role.is_block)
        self._dtype_sync.outputs.append(zeros)
        return zeros

    def _replace_parameters(self, around: OuterModules) -> None:
        """Parameters that the model itself holds are on the first and the last stage; others get zeros."""
        for ancestor in around.ancestors.values():
            for name, param in list(ancestor._parameters.items()):
                if param is not None:
                    self._dtype_sync.parameters.append(ZeroParameter(ancestor, name, param))


@final
@dataclass(frozen=True, eq=False)
class ModelOutline:
    """Which stage runs which module of a whole model, before anything is cut.

    stage_of: the virtual stage of each block.
    roles: name of a block, or of a module outside of the blocks -> where it runs.
    holders: name of a parameter -> the pipeline ranks that hold it under this name.
    whole: the names of all parameters.
    """

    around: OuterModules
    stage_of: tuple[int, ...]
    roles: Mapping[str, ModuleRole]
    holders: Mapping[str, set[int]]
    whole: Names


def outline_model(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    placement: StagePlacement,
    partition: str | Sequence[int] | None,
    sides: EmbeddingAndHead,
) -> ModelOutline:
    """What each stage gets. The arguments are those of `PlainModelPart`.

    Raises:
        UsageError: the model cannot be cut so.
    """
    check_model(model, blocks)
    around = find_surroundings(model, blocks, sides.first, sides.last)
    stage_of = stage_of_layer(_bounds(model, blocks, around, partition, placement.num_stages))
    roles = _roles(blocks, stage_of, around, placement.num_stages - 1)
    holders = _holders(model, around, roles, placement)
    return ModelOutline(around, stage_of, roles, holders, names_of(model))


def most_stages(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> int:
    """The most stages of a pipeline of a plain model, with chunks; see `Ends`."""
    if not blocks:
        return 0
    return len(blocks) + sum(_may_be_alone(find_surroundings(model, blocks)))


def check_model(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Raises UsageError where the model cannot be cut, before anything is changed."""
    if not blocks:
        raise UsageError(
            f"pipeline.stages: {type(model).__name__} has no list of blocks (nn.ModuleList or nn.Sequential "
            "with several modules of one class) to cut; name the blocks in zero_optimization.units, or use "
            "PipelineModule"
        )
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in blocks))
    if len(lists) > 1:
        raise UsageError(
            f"pipeline.stages: {type(model).__name__} has {len(lists)} lists of blocks ({', '.join(lists)}), "
            "and a pipeline cuts a model with one; use PipelineModule, or name the blocks of one list in "
            "zero_optimization.units"
        )
    _check_not_compiled(model, blocks)
    for config in _configs(model):
        for name, what in _COLLECTED.items():
            if getattr(config, name, False) is True:
                raise UsageError(
                    f"config.{name} = true: {what} are not on one pipeline stage; set it to false, or set "
                    "pipeline.stages to 1"
                )
        drop = getattr(config, "layerdrop", 0.0)
        if isinstance(drop, float) and drop > 0:
            raise UsageError(
                f"config.layerdrop = {drop}: each pipeline stage would skip other blocks; set it to 0.0"
            )


def _check_not_compiled(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    inside = {id(module) for _, block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule"
        is_compiled |= getattr(module, "_compiled_call_impl", None) is not None
        if not is_compiled or id(module) in inside:
            continue
        if any(id(inner) in inside for inner in module.modules()):
            raise UsageError(
                f"pipeline.stages: {name or 'the model'} is compiled and contains blocks of several stages; "
                "compile each block instead: block.compile()"
            )


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in ("text_config", "vision_config")]
    return [entry for entry in (config, *inner) if entry is not None]


def _check_batch(batch: Any) -> None:
    for name, what in _COLLECTED.items():
        if isinstance(batch, Mapping) and batch.get(name) is True:
            raise UsageError(
                f"the batch has {name} = True: {what} are not on one pipeline stage; leave it out"
            )


def _bounds(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    around: OuterModules,
    partition: str | Sequence[int] | None,
    num_stages: int,
) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    outer = [
        sum_of([m for n, m in around.modules.items() if side in around.sides[n]], config)
        for side in (FIRST, LAST)
    ]
    sizes = [size_of(module, config) for _, module in blocks]
    method = "best" if partition is None else partition
    ends = Ends(outer[0], outer[1], _may_be_alone(around))
    return partition_layers(method, sizes, num_stages, ends)


def _may_be_alone(around: OuterModules) -> tuple[bool, bool]:
    """The first stage may have an embedding alone, the last one a head that is called after the blocks."""
    return any(FIRST in sides for sides in around.sides.values()), around.head is not None


def _roles(
    blocks: Sequence[tuple[str, nn.Module]],
    stage_of: Sequence[int],
    around: OuterModules,
    last_stage: int,
) -> dict[str, ModuleRole]:
    roles = {}
    for (name, _), stage in zip(blocks, stage_of, strict=True):
        roles[name] = ModuleRole(name, frozenset({stage}), True)
    stage_of_side = {FIRST: 0, LAST: last_stage}
    for name in around.modules:
        stages = frozenset(stage_of_side[side] for side in around.sides[name])
        is_head = name == around.head and last_stage not in stage_of
        roles[name] = ModuleRole(name, stages, False, is_head)
    return roles


def _holders(
    model: nn.Module,
    around: OuterModules,
    roles: Mapping[str, ModuleRole],
    placement: StagePlacement,
) -> dict[str, set[int]]:
    """Name of a parameter -> the pipeline ranks that hold it under this name."""
    holders: dict[str, set[int]] = {}
    for name, role in roles.items():
        for inner, _ in model.get_submodule(name).named_parameters(remove_duplicate=False):
            holders[f"{name}.{inner}"] = {placement.rank_of(stage) for stage in role.stages}
    ends = {placement.rank_of(0), placement.rank_of(placement.num_stages - 1)}
    for name, ancestor in around.ancestors.items():
        for inner, _ in ancestor.named_parameters(recurse=False, remove_duplicate=False):
            holders[f"{name}.{inner}" if name else inner] = set(ends)
    return holders


def _call_with(model: nn.Module, batch: Any) -> Any:
    """A mapping gives keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


__all__ = [
    "ModelOutline",
    "PlainModelPart",
    "EmbeddingAndHead",
    "check_model",
    "most_stages",
    "outline_model",
]
