"""Top-level keys of the config that the engine does not read, each with the reason."""

from __future__ import annotations

from ...compression import config as compression
from ...offload import config as offload
from ...tensor import config as tensor
from ...utils.schema.keys import Detail, Entry, Group, NoEffect, Refused, details
from ...utils.schema.rules import (
    ANYTHING,
    FLAG,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    either,
    number,
    size,
    whole,
)
from .optimizer import FUSED


def _switch(feature: str, remedy: str = "set it to false or remove the section") -> Refused:
    return Refused(FLAG, f"{feature} is not supported yet; {remedy}", harmless=(False,))


AMP = Group(
    {
        "enabled": Refused(
            FLAG, "Apex is not supported; use torch_autocast or bf16 instead", harmless=(False,)
        )
    },
    "Apex mixed precision",
    open=True,
)

AUTOTUNING = Group(
    {
        "enabled": _switch("autotuning"),
        **details(FLAG, "fast", "overwrite"),
        **details(TEXT, "results_dir", "exps_dir", "metric", "metric_path", "tuner_type"),
        "model_info_path": Detail(TEXT),
        **details(
            whole(0),
            *("start_profile_step", "end_profile_step", "tuner_early_stopping"),
            *("tuner_num_trials", "mp_size", "max_train_batch_size", "min_train_batch_size"),
            *("max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu"),
            "num_tuning_micro_batch_sizes",
        ),
        "arg_mappings": Detail(OBJECT),
        "model_info": Detail(OBJECT),
    },
    "searches for the fastest config",
)

HYBRID_ENGINE = Group(
    {
        "enabled": _switch("the hybrid engine"),
        **details(whole(1), "max_out_tokens", "inference_tp_size", "tp_gather_partition_size"),
        **details(FLAG, "release_inference_cache", "pin_parameters", "enable_cuda_graph"),
    },
    "inference kernels inside training",
)

NEBULA = Group(
    {
        "enabled": _switch("saving to Nebula"),
        **details(TEXT, "persistent_storage_path", "nebula_load_path"),
        **details(whole(0), "persistent_time_interval", "num_of_version_in_retention"),
        "enable_nebula_load": Detail(FLAG),
    },
    "checkpoints in a cloud service",
)

PROGRESSIVE_LAYER_DROP = Group(
    {"enabled": _switch("progressive layer drop"), **details(NUMBER, "theta", "gamma")},
    "skips layers at random",
)

CURRICULUM_LEARNING = Group(
    {
        "enabled": _switch("curriculum learning"),
        **details(TEXT, "curriculum_type", "schedule_type"),
        **details(whole(0), "min_difficulty", "max_difficulty"),
        "schedule_config": Detail(OBJECT),
    },
    "shorter sequences first",
)

DATA_EFFICIENCY = Group(
    {
        "enabled": _switch("the data efficiency library"),
        "seed": Detail(whole(0)),
        "data_sampling": Group(
            {
                **details(FLAG, "enabled", "pin_memory"),
                **details(whole(0), "num_epochs", "num_workers"),
                "curriculum_learning": Detail(OBJECT),
                "dynamic_batching": Detail(OBJECT),
            },
            "which samples are taken",
        ),
        "data_routing": Group(
            {"enabled": Detail(FLAG), "random_ltd": Detail(OBJECT)}, "which tokens are computed"
        ),
    },
    "fewer samples and tokens for the same loss",
)

_SPARSE = "block-sparse attention is not supported yet; remove the section"

SPARSE_ATTENTION = Group(
    {
        "mode": Refused(TEXT, _SPARSE, harmless=("dense",), missing="fixed"),
        **details(
            whole(0),
            *("block", "num_local_blocks", "num_global_blocks", "num_random_blocks"),
            *("num_different_global_patterns", "num_sliding_window_blocks"),
        ),
        **details(FLAG, "different_layout_per_head", "horizontal_global_attention"),
        "attention": Detail(TEXT),
        **details(LIST, "local_window_blocks", "global_block_indices", "global_block_end_indices"),
    },
    "attention over blocks",
)

_PREDIVIDE = "gradients are averaged either way; only the order of sum and division differs"

SCALARS: dict[str, Entry] = {
    "prescale_gradients": NoEffect(FLAG, _PREDIVIDE, same=(False,)),
    "gradient_predivide_factor": NoEffect(number(above=0), _PREDIVIDE, same=(1,)),
    "sparse_gradients": Refused(
        FLAG,
        "sparse gradients are not supported yet; set it to false, use sparse=False in embeddings",
        harmless=(False,),
    ),
    "allgather_size": NoEffect(
        size(1),
        "old name of zero_optimization.allgather_bucket_size: a unit is gathered in one call",
    ),
    "disable_fused_adam": NoEffect(FLAG, FUSED, same=(False,)),
    "disable_allgather": NoEffect(FLAG, "the stage decides what is gathered", same=(False,)),
    "disable_python_gc": NoEffect(FLAG, "call gc.disable() in the script", same=(False,)),
    "graph_harvesting": NoEffect(FLAG, "the update is already one native call", same=(False,)),
    "vocabulary_size": NoEffect(whole(1), "DeepSpeed uses it only for a warning"),
    "cuda_visible_devices": NoEffect(
        either(ANYTHING), "set the environment variable CUDA_VISIBLE_DEVICES"
    ),
    "local_rank": NoEffect(either(ANYTHING), "the launcher's environment says it"),
    "grandient_accumulation_steps": Refused(  # as scripts of DeepSpeed spell it, which ignores it
        whole(1), "write gradient_accumulation_steps", harmless=(1,)
    ),
    "datastates_ckpt": Group(
        {},
        "a checkpoint engine",
        open=True,
        present="checkpoints have only one writer; remove it",
    ),
}

TOP_LEVEL_KEYS: dict[str, Entry] = {
    **SCALARS,
    "amp": AMP,
    "autotuning": AUTOTUNING,
    "hybrid_engine": HYBRID_ENGINE,
    "nebula": NEBULA,
    "progressive_layer_drop": PROGRESSIVE_LAYER_DROP,
    "curriculum_learning": CURRICULUM_LEARNING,
    "data_efficiency": DATA_EFFICIENCY,
    "sparse_attention": SPARSE_ATTENTION,
    **offload.TOP_LEVEL_KEYS,
    **compression.TOP_LEVEL_KEYS,
    **tensor.TOP_LEVEL_KEYS,
}
