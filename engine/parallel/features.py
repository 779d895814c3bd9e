"""Checks that the features of a config work with the whole model, before it is divided.

`initialize` and a plan call `check_features`, so a plan refuses what the engine refuses. Nothing is sent, no
value is read, and the model stays as it is. What only slices or stages show is checked where they are made, by
functions that both call as well.
"""

from __future__ import annotations

from torch import nn

from ...utils.errors import ConfigError
from ...zero.layout.discover import found_blocks
from ..config.config import Config
from ..model.arguments import is_part


def check_features(model: nn.Module, config: Config) -> None:
    """
    Raises:
        ConfigError, UsageError: a feature does not work with this model, in one sentence.
    """
    zero, tiles = config.zero_optimization, config.sequence
    is_built = not is_part(model)  # else each rank builds its own layers
    blocks = found_blocks(model, zero.units) if is_built else []
    if config.sequence_parallel_size > 1:
        from .sequences import check_sequences

        check_sequences(model, config)
    if is_built and (tiles.tiled_loss is not False or tiles.tiled_mlp is not False):
        from .tiles import check_tiles

        check_tiles(model, blocks, config)
    if config.sparse_attention is not None and config.sparse_attention.mode != "dense":
        from ...ops.sparse_attention.huggingface import check_switch

        check_switch(model)
    if is_built and config.compile.enabled and config.tensor_parallel.size > 1:
        from ..model.compile import refuse_dropout

        refuse_dropout(model, [block for _, block in blocks] or [model], config)
    section = config.compile
    # torch has its default backend, and takes seconds to load it
    if section.enabled and (section.backend != "inductor" or section.arguments()):
        from ..model.compile import complaint_of

        complaint = complaint_of(section)
        if complaint is not None:
            raise ConfigError([complaint], config.source)
    if config.compression_training.enabled or config.quantize_training.is_on:
        from ..model.compressed_training import check_prepare

        check_prepare(model, config)


__all__ = ["check_features"]
