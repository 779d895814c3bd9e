"""The config section `sparse_attention`. Nothing here imports torch."""

from __future__ import annotations

import json
from typing import Annotated, Literal, final

from pydantic import Field

from ...utils.schema.section import Report, Section
from ...utils.schema.values import ANY_CASE, TUPLE, Count, Flag, Natural

Lengths = Annotated[tuple[Count, ...], Field(fail_fast=True, min_length=1), TUPLE]
Indices = Annotated[tuple[Natural, ...], Field(fail_fast=True), TUPLE]
_COMMON = ("block", "different_layout_per_head", "attention")
_OF_MODE = {
    "dense": (),
    "fixed": (
        *_COMMON,
        *("num_local_blocks", "num_global_blocks", "horizontal_global_attention"),
        "num_different_global_patterns",
    ),
    "variable": (
        *_COMMON,
        *("num_random_blocks", "local_window_blocks", "global_block_indices"),
        *("global_block_end_indices", "horizontal_global_attention"),
    ),
    "bigbird": (
        *_COMMON,
        *("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    ),
    "bslongformer": (
        *_COMMON,
        *("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"),
    ),
    "local_sliding_window": ("block", "attention", "num_sliding_window_blocks"),
}
_PATH = "sparse_attention"


@final
class SparseAttention(Section):
    """Attention over the blocks of a layout, in the models of transformers that the engine trains."""

    mode: Annotated[
        Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"],
        ANY_CASE,
    ] = Field("fixed", description="the rule of the layout; dense leaves the model as it is")
    block: Count = Field(16, description="tokens of a block; 64 is fast on CPUs")
    different_layout_per_head: Flag = Field(
        False, description="each head has its own layout, which differs in random or global blocks"
    )
    attention: Annotated[Literal["bidirectional", "unidirectional"], ANY_CASE] = Field(
        "bidirectional",
        description="unidirectional: no token sees one after it; models that are causal are so with both",
    )
    num_local_blocks: Count = Field(4, description="blocks of a window; mode fixed")
    num_global_blocks: Count = Field(
        1, description="blocks that all see; of each window in mode fixed, the first in bigbird"
    )
    horizontal_global_attention: Flag = Field(
        False, description="global blocks see all blocks as well; modes fixed and variable"
    )
    num_different_global_patterns: Count = Field(
        1, description="global blocks are at so many places, by head; mode fixed"
    )
    num_random_blocks: Natural = Field(
        0, description="random blocks of each row; modes variable and bigbird"
    )
    local_window_blocks: Lengths = Field(
        (4,), description="blocks of each window, the last for the rest; mode variable"
    )
    global_block_indices: Indices = Field(
        (0,), description="blocks that all see; modes variable and bslongformer"
    )
    global_block_end_indices: Indices | None = Field(
        None, description="global blocks are ranges, and these their ends; null: single blocks"
    )
    num_sliding_window_blocks: Count = Field(
        3, description="blocks of the band; modes bigbird, bslongformer, local_sliding_window"
    )
    block_causality: Flag = Field(
        False,
        description="unidirectional layouts are causal by blocks, as in DeepSpeed: a token sees those after it "
        "in its own block; not for causal models",
    )
    seed: Natural = Field(0, description="of random blocks")

    @property
    def is_causal(self) -> bool:
        """Causality by elements is asked for."""
        return self.attention == "unidirectional" and not self.block_causality

    @property
    def rule(self) -> str:
        """The layout as text."""
        values = {name: getattr(self, name) for name in _OF_MODE[self.mode]}
        return json.dumps({"mode": self.mode, "seed": self.seed, **values}, sort_keys=True)

    def check_with(self, config: object, report: Report) -> None:
        """See `Section.check_with`: what DeepSpeed's classes check, before a model is there."""
        for name in sorted(self.model_fields_set - {"mode", "seed", *_OF_MODE[self.mode]}):
            self._note_idle(name, report)
        size, local = self.num_global_blocks, self.num_local_blocks
        patterns = self.num_different_global_patterns
        if self.mode == "fixed":
            if local % size:
                text = f"must be a multiple of num_global_blocks ({size})"
                report.complain(f"{_PATH}.num_local_blocks", local, text)
            elif patterns > local // size:
                text = f"must be at most num_local_blocks / num_global_blocks ({local // size})"
                report.complain(f"{_PATH}.num_different_global_patterns", patterns, text)
            if patterns > 1 and not self.different_layout_per_head:
                text = "places differ by head: set different_layout_per_head to true"
                report.complain(f"{_PATH}.num_different_global_patterns", patterns, text)
        is_horizontal = self.horizontal_global_attention and self.mode in ("fixed", "variable")
        if is_horizontal and self.attention != "bidirectional":
            text = 'rows that see all blocks need attention = "bidirectional"; set it to false'
            report.complain(f"{_PATH}.horizontal_global_attention", True, text)
        self._check_ranges(report)

    def _note_idle(self, name: str, report: Report) -> None:
        """A key that this mode does not read, unless it has its default."""
        if self.mode == "dense" or getattr(self, name) == type(self).model_fields[name].default:
            return
        if name != "block_causality":
            report.without_effect.append((f"{_PATH}.{name}", f'mode "{self.mode}" has no such key'))
        elif self.attention != "unidirectional":
            report.without_effect.append((f"{_PATH}.{name}", 'attention is not "unidirectional"'))

    def _check_ranges(self, report: Report) -> None:
        starts, ends = self.global_block_indices, self.global_block_end_indices
        if ends is None or self.mode not in ("variable", "bslongformer"):
            return
        key = f"{_PATH}.global_block_end_indices"
        if len(starts) != len(ends):
            text = f"must have as many entries as global_block_indices ({len(starts)})"
            report.complain(key, list(ends), text)
        elif any(start >= end for start, end in zip(starts, ends, strict=True)):
            report.complain(key, list(ends), f"each must be above its start in {list(starts)}")


__all__ = ["SparseAttention"]
