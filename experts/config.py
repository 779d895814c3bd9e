"""The section expert_parallel: experts of a mixture on different ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, final

from pydantic import Field

from ..utils.schema.section import Entry, NoEffect, Refused, Report, Section
from ..utils.schema.values import ANY_CASE, Count, Flag, Natural, NonNegative, Number

_MODEL = "the model's own router, gates and activation are used"
_OWN = "tokens travel by all_to_all of torch.distributed"
_LIST = "for experts in an nn.ModuleList"
# names of the buffers that routers add to scores for the choice alone, in models of transformers
BIASES = ("e_score_correction_bias", "expert_bias", "expert_biases")
Auto = Annotated[Literal["auto"], ANY_CASE]


def _unused(why: str, kind: Any, names: str) -> dict[str, Entry]:
    return {name: NoEffect(kind, why) for name in names.split()}


class Tiles(Protocol):
    """The section `sequence`."""

    @property
    def tiled_mlp(self) -> bool | int: ...


class Graphs(Protocol):
    """The section `zero_optimization`."""

    @property
    def divergent_graphs(self) -> bool: ...


class Neighbours(Protocol):
    """What the rules of this section read of the rest of the config."""

    @property
    def needs_whole_tensors(self) -> bool: ...
    @property
    def optimizer_type(self) -> str: ...
    @property
    def sequence(self) -> Tiles: ...
    @property
    def zero_optimization(self) -> Graphs: ...


@final
class ExpertParallel(Section):
    """Experts of a mixture are on different ranks, and tokens are sent to them."""

    own_auto: ClassVar[frozenset[str]] = frozenset(
        {"autoep_size", "top_k", "score_func", "score_apply", "routed_scaling_factor"}
    )
    others: ClassVar[Mapping[str, Entry]] = {
        "expert_tensor_parallel_size": Refused(
            Count, "an expert is whole on its rank; set it to 1", harmless=(1,)
        ),
        **_unused("experts are found by how they are called", Any, "preset_model"),
        **_unused(_MODEL, Any, "expert_activation gate_up_impl expert_w1 expert_w2 expert_w3"),
        **_unused(
            "the model chooses how it multiplies, in transformers by experts_implementation",
            Flag,
            "use_grouped_mm disable_triton_grouped_mm",
        ),
        **_unused("sums over experts have one fixed order", Any, "combine_impl row_weighting_impl"),
        **_unused(
            _OWN, Any, "comm_num_sm comm_qp_margin comm_max_tokens_per_rank async_split_plan"
        ),
        **_unused("groups of ranks are checked always", Flag, "validate_folding_routing"),
        "comm_backend": Refused(Any, f'{_OWN}; set it to "comm"', harmless=("comm", None)),
    }

    enabled: Flag = Field(False, description="experts of a mixture are on different ranks")
    autoep_size: Natural | Auto = Field(
        1, description="ranks that share the experts of a layer; 0 and auto: as many as fit"
    )
    chunks: Count = Field(
        1,
        description="parts of the tokens of a call: one travels while experts compute another one",
    )
    moe_layer_pattern: str | None = Field(
        None,
        description="regular expression or glob of the names of blocks with experts; null: all",
    )
    expert_pattern: str | None = Field(
        None,
        description="glob of the names of modules or lists of experts; null: all that are found",
    )
    router_pattern: str | None = Field(
        None, description=f"glob of the name of a router in its block; null: found ({_LIST})"
    )
    num_experts_attr: str | None = Field(
        None, description=f"attribute of model.config with the number of experts ({_LIST})"
    )
    top_k: Count | Auto = Field("auto", description=f"experts of a token ({_LIST})")
    top_k_attr: str | None = Field(
        None, description=f"attribute of model.config with the experts of a token ({_LIST})"
    )
    score_func: Annotated[Literal["auto", "softmax", "sigmoid"], ANY_CASE] = Field(
        "auto", description=f"makes scores of logits ({_LIST})"
    )
    score_apply: Annotated[Literal["auto", "pre", "post"], ANY_CASE] = Field(
        "auto", description=f"weights multiply the inputs or the outputs of experts ({_LIST})"
    )
    route_norm: Flag | None = Field(
        None, description=f"weights of a token are divided by their sum ({_LIST})"
    )
    route_scale: Number = Field(1.0, description=f"factor of all weights; 1.0: found ({_LIST})")
    routed_scaling_factor: Number | Auto = Field(
        "auto", description=f"the same, before route_scale ({_LIST})"
    )
    num_expert_groups: Count | None = Field(
        None, description=f"groups of neighbouring experts ({_LIST})"
    )
    num_limited_groups: Count | None = Field(
        None, description=f"groups from which a token chooses ({_LIST})"
    )
    has_shared_experts: Flag | None = Field(
        None, description=f"a block has experts that all tokens go to; null: found ({_LIST})"
    )
    shared_experts_pattern: str | None = Field(
        None, description=f"glob of the name of shared experts in their block ({_LIST})"
    )
    shared_experts_gate_pattern: str | None = Field(
        None, description=f"glob of the name of the gate of shared experts ({_LIST})"
    )
    load_balance_coeff: NonNegative = Field(
        0.0,
        description="how far the bias of a router moves in a step, up for experts with fewer tokens than the "
        "mean of all ranks; 0: not at all",
    )

    @property
    def num_ranks(self) -> int:
        """The ranks that share the experts of a layer; 1 also where the model decides."""
        size = self.autoep_size
        return size if self.enabled and isinstance(size, int) and size else 1

    @property
    def setting(self) -> str:
        """The key and its value, for messages."""
        return f"expert_parallel.autoep_size = {self.autoep_size}"

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. What needs whole tensors, or equal numbers of calls on all ranks."""
        if not self.enabled:
            return
        # Muon updates one matrix after the other, and each is whole on its rank
        if self.autoep_size != 1 and config.needs_whole_tensors and config.optimizer_type != "Muon":
            report.complain(
                "optimizer.type",
                config.optimizer_type,
                f"it uses norms of whole tensors, and {self.setting} gives each rank some of the experts in a "
                "tensor; choose an optimizer such as AdamW or Muon, or set autoep_size to 1",
            )
        if config.zero_optimization.divergent_graphs:
            report.complain(
                "zero_optimization.divergent_graphs",
                True,
                "ranks that run different modules do not meet in the exchanges of tokens; set it to false, or "
                "expert_parallel.enabled to false",
            )
        if config.sequence.tiled_mlp is not False:
            report.complain(
                "sequence.tiled_mlp",
                config.sequence.tiled_mlp,
                "ranks may have unequal numbers of tiles, and all take part in each exchange of tokens; "
                "set it to false, or expert_parallel.enabled to false",
            )


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "use_data_before_expert_parallelism": NoEffect(
        Flag, "ranks that share experts are neighbours; the numbers are the same", same=(False,)
    ),
}

__all__ = ["BIASES", "TOP_LEVEL_KEYS", "ExpertParallel"]
