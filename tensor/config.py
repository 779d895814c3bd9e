"""The keys of tensor, sequence and expert parallelism in the config. None is supported yet."""

from __future__ import annotations

from ..utils.schema.keys import Detail, Entry, Group, NoEffect, Refused, details
from ..utils.schema.rules import ANYTHING, FLAG, LIST, TEXT, dtype_name, whole

_TENSOR = (
    "tensor parallelism is not supported yet; set it to 1, and shard with zero_optimization.stage"
)
_EXPERT = "expert parallelism is not supported yet; set it to false or remove the section"

TENSOR_PARALLEL = Group(
    {
        "autotp_size": Refused(whole(0), _TENSOR, harmless=(0, 1)),
        "enabled": Detail(FLAG),
        "dtype": Detail(TEXT),
        "tp_overlap_comm": Detail(FLAG),
        "tp": Group(
            {
                "tp_size": Refused(whole(1), _TENSOR, harmless=(1,)),
                "tp_grain_size": Detail(whole(1)),
                **details(ANYTHING, "mpu", "tp_group"),
            },
            "size of a group",
        ),
        "tp_size": Refused(whole(0), _TENSOR, harmless=(0, 1)),
        "partition_config": Group(
            {"use_default_specs": Detail(FLAG), "layer_specs": Detail(LIST)},
            "which layers are sharded",
        ),
        "vocab_parallel_lm_head": Detail(FLAG),
        **details(TEXT, "preset_model", "vocab_parallel_ce_backend"),
        **details(FLAG, "keep_module_on_host", "kernel_inject", "replace_with_kernel_inject"),
        "injection_policy_tuple": Detail(ANYTHING),
    },
    "shards the layers of a model over ranks",
)

EXPERT_PARALLEL = Group(
    {
        "enabled": Refused(FLAG, _EXPERT, harmless=(False,)),
        **details(
            ANYTHING,
            *("autoep_size", "expert_tensor_parallel_size", "preset_model", "moe_layer_pattern"),
            *("expert_pattern", "router_pattern", "use_grouped_mm", "disable_triton_grouped_mm"),
            *("route_norm", "route_scale", "score_func", "score_apply", "combine_impl", "top_k"),
            *("routed_scaling_factor", "num_expert_groups", "num_limited_groups"),
            *("load_balance_coeff", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr"),
            *("top_k_attr", "has_shared_experts", "shared_experts_pattern"),
            *("shared_experts_gate_pattern", "validate_folding_routing"),
        ),
    },
    "distributes the experts of a mixture over ranks",
)

TOP_LEVEL_KEYS: dict[str, Entry] = {
    "tensor_parallel": TENSOR_PARALLEL,
    "sequence_parallel_size": Refused(
        whole(1),
        "sequence parallelism is not supported yet; set it to 1",
        harmless=(1,),
    ),
    "seq_parallel_communication_data_type": NoEffect(
        dtype_name("fp32", "fp16", "bf16"),
        "it only matters with sequence parallelism, which is not supported yet",
    ),
    "expert_parallel": EXPERT_PARALLEL,
    "use_data_before_expert_parallelism": NoEffect(
        FLAG, "it only matters with expert parallelism, which is not supported yet", same=(False,)
    ),
}
