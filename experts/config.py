"""The section expert_parallel: experts of a mixture on different ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from ..utils.schema.section import Entry, NoEffect, Refused, Section, details
from ..utils.schema.values import ANY_CASE, Count, Flag, Natural, NonNegative

_MODEL = "the model's own router, gates and activation are used"
_OWN = "tokens travel by all_to_all of torch.distributed"


def _unused(why: str, kind: Any, names: str) -> dict[str, Entry]:
    return {name: NoEffect(kind, why) for name in names.split()}


@final
class ExpertParallel(Section):
    """Experts of a mixture are on different ranks, and tokens are sent to them."""

    own_auto: ClassVar[frozenset[str]] = frozenset({"autoep_size"})
    others: ClassVar[Mapping[str, Entry]] = {
        "expert_tensor_parallel_size": Refused(
            Count, "an expert is whole on its rank; set it to 1", harmless=(1,)
        ),
        **_unused("experts are found by how they are called", Any, "preset_model num_experts_attr"),
        **_unused(
            _MODEL,
            Any,
            "top_k_attr top_k score_func score_apply route_norm route_scale routed_scaling_factor "
            "num_expert_groups num_limited_groups expert_activation gate_up_impl expert_w1 expert_w2 "
            "expert_w3 has_shared_experts shared_experts_pattern shared_experts_gate_pattern",
        ),
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
        **details(Any, "moe_layer_pattern router_pattern"),
    }

    enabled: Flag = Field(False, description="experts of a mixture are on different ranks")
    autoep_size: Natural | Annotated[Literal["auto"], ANY_CASE] = Field(
        1, description="ranks that share the experts of a layer; 0 and auto: as many as fit"
    )
    expert_pattern: str | None = Field(
        None, description="glob of the names of the modules of experts; null: all that are found"
    )
    load_balance_coeff: NonNegative = Field(
        0.0,
        description="how far the bias of a router moves in a step, up for experts with fewer tokens than the "
        "mean of all ranks; 0: not at all",
    )

    @property
    def setting(self) -> str:
        """The key and its value, for messages."""
        return f"expert_parallel.autoep_size = {self.autoep_size}"


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "use_data_before_expert_parallelism": NoEffect(
        Flag, "ranks that share experts are neighbours; the numbers are the same", same=(False,)
    ),
}

__all__ = ["TOP_LEVEL_KEYS", "ExpertParallel"]
