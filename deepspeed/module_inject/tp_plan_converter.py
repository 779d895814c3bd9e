"""`deepspeed.module_inject.tp_plan_converter`: transformers' plan of tensor parallelism as `TPLayerSpec`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder
from .autotp_config import PartitionType, TPLayerSpec

_GATHERED = ("colwise_rep", "colwise_gather_output")  # one style under two names
_ADDED = "replicated_with_grad_allreduce"
_TYPES = {
    **dict.fromkeys(("colwise", *_GATHERED), PartitionType.COLUMN),
    "rowwise": PartitionType.ROW,
    **dict.fromkeys(("embedding_rowwise", _ADDED), PartitionType.SKIP),
}
SUPPORTED_STYLES = set(_TYPES)


class TPPlanConverter:
    """Has functions only."""

    @staticmethod
    @raises_theirs
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """One spec for each entry of a model's `_tp_plan`; None for an empty plan.

        Raises:
            UsageError: a style that is not known. Without it, only half of a pair of layers may be divided.
        """
        unknown = sorted({style for style in hf_tp_plan.values() if style.lower() not in _TYPES})
        if unknown:
            raise UsageError(
                f"unsupported partition style(s) {unknown} in the tp_plan: needs one of {sorted(_TYPES)}; "
                "write the layers yourself"
            )
        specs = []
        for pattern, given in hf_tp_plan.items():
            style = given.lower()
            spec = TPLayerSpec(
                patterns=[_of_weight(TPPlanConverter._wildcard_to_regex(pattern))],
                partition_type=_TYPES[style],
                gather_output=style in _GATHERED,
                grad_allreduce=style == _ADDED,
            )
            specs.append(spec)
        return specs or None

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        """ "layers.*.q_proj" as a regular expression, with anything before it."""
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _of_weight(regex: str) -> str:
    return regex.removesuffix(r"\.weight") + r"\.weight$"


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["TPPlanConverter"]
