"""The compression keys of the config: 1-bit optimizers, LoCo, and the keys of compressed training.

Compressed training is not supported yet, so every key that would enable it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from pydantic import Field

from ..utils.schema.section import Entry, Group, Refused, Section, details
from ..utils.schema.values import Count, Flag, Items, Natural, Number, Share, Text

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


_COMPRESSED = "compressed training is not supported yet; set it to false or remove the section"
_SWITCH = Refused(Flag, _COMPRESSED, harmless=(False,))
_ENABLED = {"enabled": _SWITCH}
_MIXED = Group(
    "moves gradually from fp16 to quantised weights",
    details(Flag, "enabled"),
    details(Number, "quantize_change_ratio"),
)
_PRUNING = {
    **_ENABLED,
    **details(Text, "method"),
    **details(Natural, "schedule_offset schedule_offset_end schedule_offset_stride"),
}


def _technique(what: str, *shared: Mapping[str, Entry]) -> Group:
    return Group(
        what,
        {
            "shared_parameters": Group("settings of all groups", *shared),
            "different_groups": Group("groups of modules, named freely", open=True),
        },
    )


_TECHNIQUES = {
    "layer_reduction": Group(
        "a student model with fewer layers",
        _ENABLED,
        details(Count, "keep_number_layer"),
        details(Text, "module_name_prefix"),
        details(Items, "teacher_layer other_module_name"),
    ),
    "weight_quantization": _technique(
        "weights in few bits",
        _ENABLED,
        details(Flag, "quantizer_kernel quantize_verbose quantize_weight_in_forward"),
        details(Natural, "schedule_offset quantize_groups"),
        details(Text, "quantization_type rounding"),
        {"fp16_mixed_quantize": _MIXED},
    ),
    "activation_quantization": _technique(
        "activations in few bits",
        _ENABLED,
        details(Text, "quantization_type range_calibration"),
        details(Natural, "schedule_offset"),
    ),
    "sparse_pruning": _technique(
        "individual weights set to zero",
        _PRUNING,
        details(Text, "block_pattern"),
        details(Number, "dense_ratio"),
        details(Items, "excluded_modules"),
    ),
    "row_pruning": _technique("rows set to zero", _PRUNING),
    "head_pruning": _technique(
        "attention heads set to zero", _PRUNING, details(Count, "num_heads")
    ),
    "channel_pruning": _technique("channels set to zero", _PRUNING),
}
_ALGORITHM = Group("how values are rounded", details(Text, "q_type rounding"))

TOP_LEVEL_KEYS: dict[str, Entry] = {
    "compression_training": Group("compresses the model while it trains", _TECHNIQUES),
    "quantize_training": Group(
        "older form of compression_training.weight_quantization",
        _ENABLED,
        details(Flag, "quantize_verbose quantizer_kernel"),
        {"quantize_eigenvalue": _SWITCH},
        details(Text, "quantize_type"),
        details(Count, "quantize_groups"),
        {
            "quantize_bits": Group(
                "first and last number of bits", details(Count, "start_bits target_bits")
            ),
            "quantize_schedule": Group(
                "when the number of bits is reduced",
                details(Natural, "quantize_period schedule_offset"),
            ),
            "quantize_algo": _ALGORITHM,
            "quantize-algo": _ALGORITHM,  # an old spelling, which examples still have
            "fp16_mixed_quantize": _MIXED,
            "eigenvalue": Group("curvature of the layers", _ENABLED, open=True),
        },
    ),
    "eigenvalue": Group(
        "curvature of the layers, for quantize_training",
        _ENABLED,
        details(Flag, "verbose"),
        details(Number, "tol stability"),
        details(Natural, "max_iter gas_boundary_resolution layer_num"),
        details(Text, "layer_name model_name"),
    ),
    "weight_quantization": Group(
        "quantised weights for inference",
        details(Any, "enabled quantized_initialization post_init_quant"),
        present="quantised inference is not part of xds; remove the section",
    ),
}
