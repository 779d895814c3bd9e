"""The compression keys of the config: 1-bit optimizers, LoCo, and the keys of compressed training.

Compressed training is not supported yet, so every key that would enable it is refused.
"""

from __future__ import annotations

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


def _switch() -> Refused:
    return Refused(Flag, _COMPRESSED, harmless=(False,))


_MIXED = Group(
    {**details(Flag, "enabled"), **details(Number, "quantize_change_ratio")},
    "moves gradually from fp16 to quantised weights",
)
_GROUPS = Group({}, "groups of modules, named freely", open=True)

_PRUNING = {
    "enabled": _switch(),
    **details(Text, "method"),
    **details(Natural, "schedule_offset schedule_offset_end schedule_offset_stride"),
}


def _technique(shared: dict[str, Entry], what: str) -> Group:
    keys = Group(shared, "settings of all groups")
    return Group({"shared_parameters": keys, "different_groups": _GROUPS}, what)


COMPRESSION_TRAINING = Group(
    {
        "layer_reduction": Group(
            {
                "enabled": _switch(),
                **details(Count, "keep_number_layer"),
                **details(Text, "module_name_prefix"),
                **details(Items, "teacher_layer other_module_name"),
            },
            "a student model with fewer layers",
        ),
        "weight_quantization": _technique(
            {
                "enabled": _switch(),
                **details(Flag, "quantizer_kernel quantize_verbose quantize_weight_in_forward"),
                **details(Natural, "schedule_offset quantize_groups"),
                **details(Text, "quantization_type rounding"),
                "fp16_mixed_quantize": _MIXED,
            },
            "weights in few bits",
        ),
        "activation_quantization": _technique(
            {
                "enabled": _switch(),
                **details(Text, "quantization_type range_calibration"),
                **details(Natural, "schedule_offset"),
            },
            "activations in few bits",
        ),
        "sparse_pruning": _technique(
            {
                **_PRUNING,
                **details(Text, "block_pattern"),
                **details(Number, "dense_ratio"),
                **details(Items, "excluded_modules"),
            },
            "individual weights set to zero",
        ),
        "row_pruning": _technique(dict(_PRUNING), "rows set to zero"),
        "head_pruning": _technique(
            {**_PRUNING, **details(Count, "num_heads")}, "attention heads set to zero"
        ),
        "channel_pruning": _technique(dict(_PRUNING), "channels set to zero"),
    },
    "compresses the model while it trains",
)

_ALGORITHM = Group(details(Text, "q_type rounding"), "how values are rounded")

QUANTIZE_TRAINING = Group(
    {
        "enabled": _switch(),
        **details(Flag, "quantize_verbose quantizer_kernel"),
        "quantize_eigenvalue": _switch(),
        **details(Text, "quantize_type"),
        **details(Count, "quantize_groups"),
        "quantize_bits": Group(
            details(Count, "start_bits target_bits"), "first and last number of bits"
        ),
        "quantize_schedule": Group(
            details(Natural, "quantize_period schedule_offset"),
            "when the number of bits is reduced",
        ),
        "quantize_algo": _ALGORITHM,
        "quantize-algo": _ALGORITHM,  # an old spelling, which examples still have
        "fp16_mixed_quantize": _MIXED,
        "eigenvalue": Group({"enabled": _switch()}, "curvature of the layers", open=True),
    },
    "older form of compression_training.weight_quantization",
)

EIGENVALUE = Group(
    {
        "enabled": _switch(),
        **details(Flag, "verbose"),
        **details(Number, "tol stability"),
        **details(Natural, "max_iter gas_boundary_resolution layer_num"),
        **details(Text, "layer_name model_name"),
    },
    "curvature of the layers, for quantize_training",
)

WEIGHT_QUANTIZATION = Group(
    details(Any, "enabled quantized_initialization post_init_quant"),
    "quantised weights for inference",
    present="quantised inference is not part of xds; remove the section",
)

TOP_LEVEL_KEYS: dict[str, Entry] = {
    "compression_training": COMPRESSION_TRAINING,
    "quantize_training": QUANTIZE_TRAINING,
    "eigenvalue": EIGENVALUE,
    "weight_quantization": WEIGHT_QUANTIZATION,
}
