"""The sections tensor_parallel and sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, final

from pydantic import Field

from ..ops.sparse_attention.config import SparseAttention
from ..utils.schema.section import Entry, Group, Refused, Report, Section, details
from ..utils.schema.values import ANY_CASE, Count, Flag, Names, Natural, Object, Text

_OWN_KEY = "write the number of ranks as tensor_parallel.tp_size"


class Neighbours(Protocol):
    """What the rules of these sections read of the rest of the config."""

    @property
    def needs_whole_tensors(self) -> bool: ...
    @property
    def optimizer_type(self) -> str: ...
    @property
    def sparse_attention(self) -> SparseAttention | None: ...
    @property
    def sequence_parallel_size(self) -> int: ...
    @property
    def pipeline_stages(self) -> int: ...
    @property
    def drops_tokens(self) -> bool: ...


@final
class TensorParallel(Section):
    """Layers are cut over ranks: each rank has some columns or rows of a weight, and some heads."""

    aliases: ClassVar[Mapping[str, str]] = {"autotp_size": "tp_size"}
    others: ClassVar[Mapping[str, Entry]] = {
        **details(Flag, "enabled keep_module_on_host kernel_inject"),
        **details(Flag, "replace_with_kernel_inject"),
        "tp": Group(
            "size of a group",
            {"tp_size": Refused(Count, _OWN_KEY, harmless=(1,))},
            details(Count, "tp_grain_size"),
            details(Any, "mpu tp_group"),
        ),
        **details(Text, "dtype preset_model vocab_parallel_ce_backend"),
        **details(Any, "injection_policy_tuple"),
    }

    tp_size: Natural = Field(
        1, description="ranks that share the layers of a model; 0 and 1: layers are not cut"
    )
    plan: Object | None = Field(
        None,
        description="module-name glob -> colwise, colwise_gather_output, packed_colwise, rowwise, "
        "embedding_rowwise, sequence_parallel ...; null: the plan of the model, or one that is found",
    )
    partition_config: Object | None = Field(
        None,
        description="DeepSpeed's layer_specs, which come before every plan; with use_default_specs "
        "false other layers stay whole",
    )
    tp_overlap_comm: Flag = Field(
        False,
        description="the sums of input gradients travel while the gradients of weights are computed",
    )
    vocab_parallel_lm_head: Flag = Field(
        False,
        description="the logits stay cut over tensor ranks, and the loss is computed from them; "
        "false: they are gathered",
    )

    @property
    def size(self) -> int:
        """The number of ranks that share a layer."""
        return max(1, self.tp_size)

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`."""
        if self.size == 1:
            return
        if config.needs_whole_tensors:
            report.complain(
                "optimizer.type",
                config.optimizer_type,
                f"it uses norms or products of whole tensors, and tensor_parallel.tp_size = {self.size} cuts "
                "them; choose an optimizer such as AdamW, or set tensor_parallel.tp_size to 1",
            )
        sparse = config.sparse_attention
        if sparse is not None and sparse.different_layout_per_head:
            report.complain(
                "sparse_attention.different_layout_per_head",
                True,
                f"each of tensor_parallel.tp_size = {self.size} ranks has some of the heads, and layouts "
                "are not "
                "cut; set it to false",
            )


@final
class LongSequences(Section):
    """Long sequences: who cuts them over sequence ranks, and what computes one tile of the tokens at a time."""

    cut_by: Annotated[Literal["engine", "script"], ANY_CASE] = Field(
        "engine",
        description="who gives each sequence rank its tokens, and sums the losses; script: each rank passes "
        "its own tokens with their position_ids",
    )
    cut_in_eval: Flag = Field(
        True,
        description="false: after eval() each rank passes whole batches of its own, where cut_by is script",
    )
    tiled_mlp: Flag | Count = Field(
        False,
        description="tokens of a tile in the MLPs of the blocks; true: as many as the model is wide",
    )
    tiled_loss: Flag | Count = Field(
        False,
        description="tokens of a tile in head and loss of a causal language model of transformers; true: 1024",
    )
    tiled_modules: Names | None = Field(
        None,
        description='names of the MLPs inside of a block; null: "mlp", "feed_forward" or "ffn"',
    )

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. What sequence ranks do not allow."""
        ranks, stages, sparse = (
            config.sequence_parallel_size,
            config.pipeline_stages,
            config.sparse_attention,
        )
        if ranks == 1:
            return
        if stages > 1 and self.cut_by != "engine":
            report.complain(
                "sequence.cut_by",
                "script",
                f'all of pipeline.stages = {stages} read the whole batch; set it to "engine", or the '
                "stages to 1",
            )
        if sparse is not None and sparse.mode != "dense":
            report.complain(
                "sparse_attention.mode",
                sparse.mode,
                f"sequence_parallel_size = {ranks} exchanges heads around the model's own attention; "
                "remove the "
                "section, or set sequence_parallel_size to 1",
            )
        if config.drops_tokens:
            report.complain(
                "sequence_parallel_size",
                ranks,
                "a layer that drops tokens must have all tokens of a sample on its rank; set it to 1, or "
                "data_efficiency.data_routing.random_ltd.enabled to false",
            )
