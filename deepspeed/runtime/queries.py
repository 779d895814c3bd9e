"""DeepSpeed's methods that return config values: a table of key paths, and a table of fixed values."""

from __future__ import annotations

from typing import Any

from ...engine.config.config import Config

# name of the method -> path of the key; None where the section is absent
PATHS: dict[str, str] = {
    "bfloat16_enabled": "bf16.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "loss_scale": "fp16.loss_scale",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.max_reuse_distance",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
}

# name of the method -> section of zero_optimization; None, or False, where it offloads nothing
OFFLOAD: dict[str, str] = {
    "zero_cpu_offload": "offload_optimizer",
    "zero_offload_optimizer": "offload_optimizer",
    "zero_offload_param": "offload_param",
}

# the config has no such key, or refuses the feature
ANSWERS: dict[str, Any] = {
    "amp_enabled": False,
    "autotuning_enabled": False,
    "curriculum_learning_enabled": False,
    "data_efficiency_enabled": False,
    "pld_enabled": False,
    "random_ltd_enabled": False,
    "use_node_local_storage": False,
    "zero_contiguous_gradients": True,
    "zero_load_from_fp32_weights": True,
    "zero_reduce_scatter": True,
}


def knows(name: str) -> bool:
    """There is an answer for this name."""
    return any(name in table for table in (PATHS, ANSWERS, OFFLOAD))


def answer(config: Config, name: str) -> Any:
    """The return value of `engine.<name>()`, for a name in either table."""
    if name in ANSWERS:
        return ANSWERS[name]
    if name in OFFLOAD:
        section = getattr(config.zero_optimization, OFFLOAD[name])
        is_used = section.device != "none"
        return is_used if name == "zero_cpu_offload" else section if is_used else None
    found: Any = config
    for part in PATHS[name].split("."):
        found = getattr(found, part, None)
    return found
