"""The part of a plain model that a pipeline rank would have, while the model stays whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, final

from torch import nn

from .names import names_of_part
from .part import Block, Flow, Part, StagePlacement
from .plain_models import ModelOutline


@final
class OutlinedPart(Part):
    """Its modules, blocks and names. It cannot run."""

    def run(self, stage: int, batch: Any, arrived: Flow | None, micro_batch: int) -> Any:
        _refuse()

    def recomputing(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        _refuse()

    def release(self, stage: int, micro_batch: int) -> None:
        return

    def restore(self) -> None:
        return


@contextmanager
def outlined_part(
    model: nn.Module, outline: ModelOutline, placement: StagePlacement, rank: int
) -> Iterator[OutlinedPart]:
    """Hide what pipeline rank `rank` would not have, as `PlainModelPart` takes it away; then show it again.

    Args:
        outline: of `model`, see `outline_model`.
    """
    here = set(placement.stages_of(rank))
    others = {
        id(model.get_submodule(name))
        for name, role in outline.roles.items()
        if not role.stages & here
    }
    blocks = tuple(
        Block(name, model.get_submodule(name), stage)
        for (name, role), stage in zip(outline.roles.items(), outline.stage_of, strict=False)
        if stage in here
    )
    ends = {0, placement.num_stages - 1} & here
    before = {
        module: (dict(module._modules), dict(module._parameters)) for module in model.modules()
    }
    for module, (children, _) in before.items():
        for name, child in children.items():
            if id(child) in others:
                module._modules[name] = nn.Module()
    for ancestor in () if ends else outline.around.ancestors.values():
        ancestor._parameters.clear()
    try:
        names = names_of_part(outline.whole, model, outline.holders)
        yield OutlinedPart(model, blocks, names)
    finally:
        for module, (children, params) in before.items():
            module._modules.update(children)
            module._parameters.update(params)


def _refuse() -> NoReturn:
    raise AssertionError("an outline of a part cannot run")


__all__ = ["OutlinedPart", "outlined_part"]
