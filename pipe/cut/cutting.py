"""Cuts a model: chooses how, by what the model is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..module import PipelineModule
from .layer_lists import LayerListPart, PipelineLayers, SequentialLayers
from .part import Part, StagePlacement
from .plain_models import EmbeddingAndHead, PlainModelPart


def cut_model(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    placement: StagePlacement,
    rank: int,
    partition: str | Sequence[int] | None = None,
    sides: EmbeddingAndHead | None = None,
) -> Part:
    """This rank's part of `model`. Its other parameters are freed, unless the caller still holds them.

    Args:
        blocks: name and module of each block, found before the cut; not read for lists of layers.
        rank: this process's rank in its pipeline.
        partition: "uniform", "parameters", "best", "type:REGEX" or bounds. None: a PipelineModule's own
            partition_method, else "best".
        sides: modules that run before and after the blocks of a plain model; None: found from the model.

    Raises:
        UsageError: the model cannot be cut so; nothing was changed.
    """
    if isinstance(model, PipelineModule):
        return LayerListPart(PipelineLayers(model), placement, rank, partition)
    if isinstance(model, nn.Sequential):
        return LayerListPart(SequentialLayers(model), placement, rank, partition)
    return PlainModelPart(model, blocks, placement, rank, partition, sides or EmbeddingAndHead())


__all__ = ["cut_model"]
