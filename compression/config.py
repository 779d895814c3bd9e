"""The compression keys of the config: 1-bit optimizers, LoCo, and the keys of compressed training.

Compressed training is not supported yet, so every key that would enable it is refused.
"""

from __future__ import annotations

from typing import Annotated, final

from pydantic import Field

from ..utils.schema.keys import Detail, Entry, Group, Refused, details
from ..utils.schema.rules import ANYTHING, FLAG, LIST, NUMBER, TEXT, number, whole
from ..utils.schema.section import Section

ONE_BIT_OPTIMIZERS = ("OneBitAdam", "OneBitLamb")


@final
class Loco(Section):
    """Feeds back what 4-bit gradients lose: zeropp_loco_param."""

    err_beta: Annotated[float, number(0, 1)] = Field(
        0.8,
        description="the weight of the earlier error in the running mean; 0 keeps the last error only",
    )
    reset_T: Annotated[int, whole(1)] = Field(  # noqa: N815 (DeepSpeed's name)
        1024, description="steps after which the error is set to 0"
    )


_COMPRESSED = "compressed training is not supported yet; set it to false or remove the section"


def _switch() -> Refused:
    return Refused(FLAG, _COMPRESSED, harmless=(False,))


_MIXED = Group(
    {"enabled": Detail(FLAG), "quantize_change_ratio": Detail(NUMBER)},
    "moves gradually from fp16 to quantised weights",
)
_GROUPS = Group({}, "groups of modules, named freely", open=True)

_PRUNING = {
    "enabled": _switch(),
    "method": Detail(TEXT),
    **details(whole(0), "schedule_offset", "schedule_offset_end", "schedule_offset_stride"),
}


def _technique(shared: dict[str, Entry], what: str) -> Group:
    keys = Group(shared, "settings of all groups")
    return Group({"shared_parameters": keys, "different_groups": _GROUPS}, what)


COMPRESSION_TRAINING = Group(
    {
        "layer_reduction": Group(
            {
                "enabled": _switch(),
                "keep_number_layer": Detail(whole(1)),
                "module_name_prefix": Detail(TEXT),
                **details(LIST, "teacher_layer", "other_module_name"),
            },
            "a student model with fewer layers",
        ),
        "weight_quantization": _technique(
            {
                "enabled": _switch(),
                **details(
                    FLAG, "quantizer_kernel", "quantize_verbose", "quantize_weight_in_forward"
                ),
                **details(whole(0), "schedule_offset", "quantize_groups"),
                **details(TEXT, "quantization_type", "rounding"),
                "fp16_mixed_quantize": _MIXED,
            },
            "weights in few bits",
        ),
        "activation_quantization": _technique(
            {
                "enabled": _switch(),
                **details(TEXT, "quantization_type", "range_calibration"),
                "schedule_offset": Detail(whole(0)),
            },
            "activations in few bits",
        ),
        "sparse_pruning": _technique(
            {
                **_PRUNING,
                "block_pattern": Detail(TEXT),
                "dense_ratio": Detail(NUMBER),
                "excluded_modules": Detail(LIST),
            },
            "individual weights set to zero",
        ),
        "row_pruning": _technique(dict(_PRUNING), "rows set to zero"),
        "head_pruning": _technique(
            {**_PRUNING, "num_heads": Detail(whole(1))}, "attention heads set to zero"
        ),
        "channel_pruning": _technique(dict(_PRUNING), "channels set to zero"),
    },
    "compresses the model while it trains",
)

_ALGORITHM = Group(details(TEXT, "q_type", "rounding"), "how values are rounded")

QUANTIZE_TRAINING = Group(
    {
        "enabled": _switch(),
        **details(FLAG, "quantize_verbose", "quantizer_kernel"),
        "quantize_eigenvalue": _switch(),
        "quantize_type": Detail(TEXT),
        "quantize_groups": Detail(whole(1)),
        "quantize_bits": Group(
            details(whole(1), "start_bits", "target_bits"), "first and last number of bits"
        ),
        "quantize_schedule": Group(
            details(whole(0), "quantize_period", "schedule_offset"),
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
        "verbose": Detail(FLAG),
        **details(NUMBER, "tol", "stability"),
        **details(whole(0), "max_iter", "gas_boundary_resolution", "layer_num"),
        **details(TEXT, "layer_name", "model_name"),
    },
    "curvature of the layers, for quantize_training",
)

WEIGHT_QUANTIZATION = Group(
    details(ANYTHING, "enabled", "quantized_initialization", "post_init_quant"),
    "quantised weights for inference",
    present="quantised inference is not part of xds; remove the section",
)

TOP_LEVEL_KEYS: dict[str, Entry] = {
    "compression_training": COMPRESSION_TRAINING,
    "quantize_training": QUANTIZE_TRAINING,
    "eigenvalue": EIGENVALUE,
    "weight_quantization": WEIGHT_QUANTIZATION,
}
