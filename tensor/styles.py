"""The words of a plan: how one module is cut. They are those of transformers.

"layers.*.self_attn.q_proj": "colwise"      the outputs of the layer are cut; its input is whole
"layers.*.self_attn.o_proj": "rowwise"      the inputs of the layer are cut; its output is summed
"embed_tokens": "embedding_rowwise"         the vocabulary is cut; the output is summed
"lm_head": "colwise_gather_output"          cut by columns, and the outputs are gathered
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from torch import nn


class StyleName(Enum):
    """How a module is cut. The value is its text in a plan."""

    COLWISE = "colwise"
    COLWISE_GATHER = "colwise_gather_output"
    ROWWISE = "rowwise"
    PACKED_COLWISE = "packed_colwise"
    """As COLWISE; the outputs are several equal parts, such as gate and up."""
    PACKED_ROWWISE = "packed_rowwise"
    """As ROWWISE; the inputs are several equal parts."""
    ROWWISE_SPLIT = "rowwise_split_input"
    """As ROWWISE; the input is whole, and each rank takes its part of it."""
    EMBEDDING = "embedding_rowwise"
    """The rows of an embedding are cut: each rank looks up its own ids, and the outputs are summed."""
    PARTIAL = "replicated_with_grad_allreduce"
    """The module is whole on every rank, and works on what is cut: its gradients are summed over the ranks."""
    TOKENS = "sequence_parallel"
    """The module is whole, and gets the tokens of its rank; so does all of its block that is not cut."""
    WHOLE = "replicate"
    """The module is whole on every rank, as if the plan did not name it."""
    VOCABULARY = "vocabulary"
    """A head whose logits stay cut: for tensor_parallel.vocab_parallel_lm_head, and not for plans."""


CUTS_COLUMNS = frozenset(
    {StyleName.COLWISE, StyleName.COLWISE_GATHER, StyleName.PACKED_COLWISE, StyleName.VOCABULARY}
)
CUTS_ROWS = frozenset({StyleName.ROWWISE, StyleName.PACKED_ROWWISE, StyleName.ROWWISE_SPLIT})
KEEPS_WHOLE = frozenset({StyleName.PARTIAL, StyleName.TOKENS, StyleName.WHOLE})
BY_HEADS = frozenset(
    {StyleName.COLWISE, StyleName.PACKED_COLWISE, StyleName.ROWWISE, StyleName.PACKED_ROWWISE}
)
"""Between these, activations are cut: heads have to stay whole."""

ALIASES = {
    "colwise_rep": StyleName.COLWISE_GATHER,
    "rowwise_rep": StyleName.ROWWISE_SPLIT,
}
EXPERTS = (
    "experts of a mixture are not cut; expert_parallel.enabled = true puts whole ones on ranks"
)
REFUSED = {
    "moe_": EXPERTS,
    "ep_": EXPERTS,
    "grouped_gemm": EXPERTS,
    "local": "layers that are cut without a sum are not supported",
    "mla_": "attention with compressed keys and values is not cut yet",
    "all_reduce": "outputs of modules without weights are not summed yet",
    "embedding_colwise": 'embeddings are cut by rows only: write "embedding_rowwise"',
}


@final
@dataclass(frozen=True)
class ParallelStyle:
    """How one module is cut.

    parts: sizes of the packed parts of the dimension that is cut; (): as many as the word says.
    units: so many equal units stay whole, such as heads; 0: heads of the module around it.
    """

    name: StyleName
    parts: tuple[int, ...] = ()
    units: int = 0

    def sizes(self, module: nn.Module) -> tuple[int, ...]:
        """The sizes of the packed parts of `module`, in the dimension that is cut."""
        if self.parts:
            return self.parts
        length = length_of(module, self.name)
        count = 1
        if self.name in (StyleName.PACKED_COLWISE, StyleName.PACKED_ROWWISE):
            count = 3 if is_transposed(module) else 2
        return (length // count,) * count


def length_of(module: nn.Module, style_name: StyleName) -> int:
    """The elements of the dimension of a layer that `style_name` cuts."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[cut_dim(module, style_name)]


def cut_dim(module: nn.Module, style_name: StyleName) -> int:
    """The dimension of a weight that `style_name` cuts."""
    if style_name is StyleName.EMBEDDING:
        return 0
    return (
        int(is_transposed(module)) if style_name in CUTS_COLUMNS else int(not is_transposed(module))
    )


def is_linear(module: nn.Module) -> bool:
    """`module` computes x W^T + b, or x W + b as transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """The weight of `module` is [in_features, out_features]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


__all__ = [
    "ALIASES",
    "BY_HEADS",
    "CUTS_COLUMNS",
    "CUTS_ROWS",
    "KEEPS_WHOLE",
    "REFUSED",
    "ParallelStyle",
    "StyleName",
    "cut_dim",
    "is_linear",
    "is_transposed",
    "length_of",
]
