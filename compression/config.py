"""The compression keys of the config: 1-bit optimizers, LoCo, and what belongs to no section of its own."""

from __future__ import annotations

from typing import Any, final

from pydantic import Field

from ..utils.schema.section import Entry, Group, NoEffect, Section, details
from ..utils.schema.values import Count, Flag, Natural, Number, Share, Text
from .training.config import EIGENVALUE

ONE_BIT_OPTIMIZERS = ("OneBitAdam", "OneBitLamb")


@final
class Loco(Section):
    """Feeds back what 4-bit gradients lose: zeropp_loco_param."""

    err_beta: Share = Field(
        0.8,
        description="the weight of the earlier error in the running mean; 0 keeps the last error only",
    )
    reset_T: Count = Field(  # noqa: N815 (DeepSpeed's name)
        1024, description="steps after which the error is set to 0"
    )


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "eigenvalue": Group(
        "curvature of the layers, for quantize_training",
        {"enabled": NoEffect(Flag, EIGENVALUE, same=(False,))},
        details(Flag, "verbose"),
        details(Number, "tol stability"),
        details(Natural, "max_iter gas_boundary_resolution layer_num"),
        details(Text, "layer_name model_name"),
    ),
    "weight_quantization": Group(
        "quantised weights for inference",
        details(Any, "enabled quantized_initialization post_init_quant"),
        present="only xds.init_inference stores weights so: let its key quant.weight be this section",
    ),
}
