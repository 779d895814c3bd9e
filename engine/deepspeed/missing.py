"""DeepSpeed's names that xds does not implement: each can be imported, derived from and compared.

Scripts import more names than they use (a layer for one isinstance test, an optimizer for one branch).
So an import alone must not fail. Calling such a name, or reading its attributes, raises one sentence.
Any name of a known module has a stand-in. Here are the reasons, by name and by module.
"""

from __future__ import annotations

from abc import ABCMeta
from functools import cache
from typing import Any, NoReturn, final

from ...utils.errors import UsageError

_MOE = (
    "the layer deepspeed.moe.layer.MoE and the functions of deepspeed.moe.utils are there; experts of other "
    "models are found by the config's section expert_parallel, see docs/experts.md"
)
_ONE_BIT_ADAM = (
    'its messages belong to the engine: set optimizer.type to "OneBitAdam" or "OneBitLamb" in '
    "the config, and pass no optimizer"
)
_INFERENCE = (
    "use deepspeed.init_inference, see docs/inference.md; to serve weights use an inference library"
)
_HYBRID = "every engine generates: call engine.generate(...), see docs/generation.md"
_KERNELS = "xds has no such kernel; torch's own are used"
_TENSOR = (
    "xds slices layers itself: set the section tensor_parallel in the config, see docs/tensor.md"
)
_OFFLOAD = "the config's offload_optimizer and offload_param choose where states are stored"
_PARAM = "a parameter of xds is a plain torch parameter; use xds.zero.get_full_param or GatheredParameters"
_CHECKPOINT_TOOLS = (
    "a checkpoint of xds loads at any stage and number of ranks, without a converter; to read its weights use "
    "xds.get_fp32_state_dict"
)
_LINEAR = (
    "LoRA and quantized linears are not supported; use peft, whose adapters train at every stage"
)
_ACTIVATIONS = (
    "activations are checkpointed whole on their rank; see the config's activation_checkpointing"
)
_INNER = "xds has no such internal state; use engine.config, or the engine's methods"
_DEEP_COMPILE = "DeepCompile is not supported"
_REDUCES = (
    "the engine reduces gradients in backward; engine.allreduce_gradients() reduces what is left"
)
_GIVEN = "use the object that the script passed to initialize"
_ABSENT = "it has no counterpart in xds"
_COMPRESSED = (
    "the config's section compression_training compresses; prepare the model with init_compression of "
    "deepspeed.compression.compress, see docs/compressed-training.md"
)
_DATA = "set the config's section data_efficiency: the engine does it, see docs/data.md and docs/dropping.md"
_SAMPLING = "the engine samples by itself: set data_efficiency.data_sampling in the config, see docs/data.md"
_SPARSE_ATTENTION = (
    "the engine's attention has no such part; use xds.ops.sparse_attention.sparse_attention"
)
_AUTOTUNING = "the command tunes: `xds --autotuning tune train.py`; `xds tune` plans layouts, see docs/tune.md"
_SCHEDULE = (
    "the engine runs tables, see docs/design/pipeline.md; pipeline.schedule takes a file of one"
)
_TIMERS = (
    "the engine logs its own times with wall_clock_breakdown; use deepspeed.utils.timer for yours"
)
_LR = "write the section scheduler of the config"
_HOSTS = "`xds --hostfile --include --exclude` reads and filters hosts"
_DEVICE = (
    "xds trains on what torch.accelerator finds, or on the CPU; the variable DS_ACCELERATOR chooses"
)
_ESTIMATE = "use `xds plan`, or the function ending with _all_live for a model on the meta device"
_TORCH = "use torch.distributed's own functions"
_LEAVES = "use set_z3_leaf_modules, which takes classes and their names"


# name -> why, and what to use instead
MISSING: dict[str, str] = {
    "DualPipeVEngine": "deepspeed.runtime.pipe.engine.PipelineEngine runs this schedule too",
    **dict.fromkeys(
        ("PipeSchedule", "TrainSchedule", "InferenceSchedule", "DataParallelSchedule"), _SCHEDULE
    ),
    "DeepSpeedConfigModel": "derive from pydantic.BaseModel",
    **dict.fromkeys(("add_tuning_arguments", "get_config_from_args"), _LR),
    **dict.fromkeys(("set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"), _LEAVES),
    "replace_transformer_layer": _INFERENCE,
    "DeepSpeedHybridEngine": _HYBRID,
    **dict.fromkeys(("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"), _KERNELS),
    **dict.fromkeys(("GDSBuilder", "io"), _OFFLOAD),
    **dict.fromkeys(("set_autotp_mode", "set_optimizer_flags"), _TENSOR),
    "CheckpointFunction": _ACTIVATIONS,
    **dict.fromkeys(
        ("fetch_hostfile", "parse_inclusion_exclusion", "parse_resource_filter"), _HOSTS
    ),
    **dict.fromkeys(("set_accelerator", "is_current_accelerator_supported"), _DEVICE),
    "DeepSpeedAccelerator": _DEVICE,
    **dict.fromkeys(
        ("sequence_tiled_compute", "SequenceTiledCompute"), "use xds.tensor.run_in_tiles"
    ),
    "safe_update_full_grad_vectorized": "use safe_get_full_grad and safe_set_full_grad in a loop",
    **{
        f"estimate_zero{stage}_model_states_mem_needs{end}": _ESTIMATE
        for stage in (2, 3)
        for end in ("", "_all_cold")
    },
    **dict.fromkeys(("all_reduce_coalesced", "all_gather_coalesced"), _TORCH),
    **dict.fromkeys(
        ("initialize_mesh_device", "inference_all_reduce", "reduce_scatter_fn"), _TORCH
    ),
    "get_all_ranks_from_group": _TORCH,
    "_INSTRUCTION_MAP": _SCHEDULE,
    "mpi_discovery": "init_distributed() reads the environment of srun and mpirun itself",
}

# methods and attributes of the engine, and of the optimizer that `initialize` returns
MISSING_METHODS: dict[str, str] = {
    "buffered_allreduce_fallback": (
        "gradients are reduced in backward; to delay this use engine.no_sync(), then step() reduces them"
    ),
    **dict.fromkeys(
        ("_exec_schedule", "pipe_buffers"),
        "the engine runs tables, see docs/design/pipeline.md; pipeline.schedule takes a file of one",
    ),
    "register_compile_pass": _DEEP_COMPILE,
    **dict.fromkeys(
        ("random_ltd_initialize", "random_ltd_scheduler", "random_ltd_config"),
        "set data_efficiency.data_routing.random_ltd.enabled to true in the config",
    ),
    "curriculum_scheduler_legacy": "set curriculum_learning.enabled to true in the config",
    "flops_profiler": "set flops_profiler.enabled in the config, and read engine.flops_profile()",
    **dict.fromkeys(("client_optimizer", "client_lr_scheduler", "training_data"), _GIVEN),
    "loaded_checkpoint_tag": "engine.load_checkpoint returns the folder, whose name is the tag",
    "refresh_fp32_params": (
        "write whole values with safe_set_full_fp32_param or GatheredParameters; the masters are updated"
    ),
    "external_loss_scale": "set fp16.loss_scale in the config",
    "override_loss_scale": "set fp16.loss_scale in the config",
    **dict.fromkeys(("bit16_groups", "fp16_groups", "single_partition_of_fp32_groups"), _PARAM),
    **dict.fromkeys(("fp32_partitioned_groups_flat", "fp32_groups_flat"), _PARAM),
    **dict.fromkeys(("averaged_gradients", "params_in_partition"), _PARAM),
    # internals of the engine
    **dict.fromkeys(
        (
            *("get_autosp_backend", "get_autotp_backend"),
            *("get_deepcompile_backend", "get_deepspeed_compile_backend"),
        ),
        _DEEP_COMPILE,
    ),
    **dict.fromkeys(
        (
            *("allreduce_and_copy", "allreduce_bucket", "allreduce_no_retain", "all_gather_scalar"),
            *("sparse_all_gather", "sparse_allreduce", "sparse_allreduce_bucket"),
            "sparse_allreduce_no_retain",
        ),
        _REDUCES,
    ),
    "clip_fp32_gradients": "step() clips; set gradient_clipping, or call engine.clip_grad_norm(max_norm)",
    **dict.fromkeys(("tensor_parallel_config", "get_tensor_parallel_rank"), _TENSOR),
    "swap_tensor_config": _OFFLOAD,
    "load_moe_state_dict": "engine.load_checkpoint loads experts too",
    "get_optimizer_configuration": "engine.config has the section optimizer",
    **dict.fromkeys(
        ("loaded_checkpoint_mp_world_size", "loaded_checkpoint_dp_world_size"), _CHECKPOINT_TOOLS
    ),
    **dict.fromkeys(("timers", "get_wall_clock_timers"), _TIMERS),
}


# module -> why none of its names is there, for names without a reason above; the longest match counts
# some are modules that DeepSpeed had before 0.19
AREAS: dict[str, str] = {
    "": _ABSENT,
    **dict.fromkeys(("inference", "module_inject", "model_implementations"), _INFERENCE),
    "moe": _MOE,
    "linear": _LINEAR,
    "compile": "DeepCompile is not supported; see the config's section compile",
    "ops": _KERNELS,
    "ops.sparse_attention": _SPARSE_ATTENTION,
    **dict.fromkeys(("nvme", "io", "ops.aio", "ops.gds", "runtime.swap_tensor"), _OFFLOAD),
    "runtime.tensor_parallel": _TENSOR,
    **dict.fromkeys(("runtime", "utils", "comm"), _INNER),
    "elasticity": "use `xds elastic`, and the config's section elasticity",
    "monitor": "the engine writes to the sections tensorboard, wandb, comet and csv_monitor of the config",
    "runtime.sequence_parallel": "use UlyssesSPAttentionHF.register_with_transformers, whose result is the mpu",
    **dict.fromkeys(("compression", "runtime.quantize", "runtime.weight_quantizer"), _COMPRESSED),
    "runtime.eigenvalue": _COMPRESSED,
    "runtime.data_pipeline": _DATA,
    "runtime.data_pipeline.data_sampling": _SAMPLING,
    "autotuning": _AUTOTUNING,
    **dict.fromkeys(("runtime.fp16.onebit", "runtime.fp16.onebit_adam"), _ONE_BIT_ADAM),
    **dict.fromkeys(("runtime.fp16.onebit_lamb", "runtime.compression"), _ONE_BIT_ADAM),
    **dict.fromkeys(("runtime.comm.nccl", "runtime.comm.mpi"), _ONE_BIT_ADAM),
    **dict.fromkeys(("runtime.hybrid_engine", "runtime.hybrid_engine_graph"), _HYBRID),
    "runtime.superoffload": "set zero_optimization.offload_optimizer.super_offload in the config",
    **dict.fromkeys(("runtime.zenflow", "runtime.domino", "nebula", "datastates"), _ABSENT),
    "checkpoint": _CHECKPOINT_TOOLS,
    "runtime.state_dict_factory": (
        "it reads Megatron's checkpoints for inference; load the weights into the model before initialize"
    ),
    "runtime.rollout": "call engine.generate(...) in a loop of your own, see docs/generation.md",
    "runtime.zero.tiling": "cut wide layers by slices, section tensor_parallel of the config",
    "runtime.compiler": "use torch.compiler, and the config's section compile",
    "runtime.sparse_tensor": "gradients are dense; use sparse=False in embeddings",
    "sequence": "set sequence_parallel_size in the config, see docs/sequence.md",
    "utils.numa": "use `xds --bind-cores-to-rank`",
    "utils.comms_logging": "set comms_logger in the config, and call engine.comms_summary()",
    "utils.zero_to_torch": "use `xds checkpoint export --dtype`",
    "utils.torch": "use torch's own functions",
    "profiling": (
        "set flops_profiler.enabled in the config, and read engine.flops_profile(); without an engine use "
        "torch.utils.flop_counter.FlopCounterMode"
    ),
    "launcher": "start scripts with `xds`",
}


@final
class NotCovered(UsageError, AttributeError):
    """An attribute that DeepSpeed has and xds does not implement; `hasattr` is False for it."""


def _message(name: str, why: str) -> str:
    return f"{name} is not covered by xds.deepspeed: {why}"


@final
class Missing(ABCMeta):
    """The type of a stand-in. It can be derived from; nothing is an instance; using it raises its message."""

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        raise UsageError(cls._text())

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and its libraries ask for these
            raise AttributeError(name)
        raise NotCovered(cls._text())

    def __bool__(cls) -> bool:
        """False, for scripts that ask `if getattr(deepspeed, name, None)`."""
        return False

    def _text(cls) -> str:
        """The message of the stand-in that `cls` is, or derives from."""
        found = next(base for base in cls.__mro__ if "_why" in vars(base))
        return str(vars(found)["_why"])


@cache
def placeholder(inside: str, name: str) -> Any:
    """The stand-in for a name of DeepSpeed's module `inside`; the same one at each call.

    A name that ends with "Error" or "Exception" is an exception class, which can be caught.
    """
    shown = f"deepspeed.{inside}.{name}".replace("..", ".")
    module = f"xds.{shown.rpartition('.')[0]}"
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), {"__module__": module, "__doc__": "Never raised by xds."})
    text = _message(shown, MISSING.get(name) or _reason(inside))
    return Missing(name, (), {"__doc__": text, "_why": text, "__module__": module})


def reason_of(inside: str) -> str | None:
    """Why there is no module `inside`; None for a module that DeepSpeed does not have either."""
    found = _reason(inside)
    return None if found in (_INNER, AREAS[""]) else found


def _reason(inside: str) -> str:
    while inside not in AREAS:
        inside = inside.rpartition(".")[0]
    return AREAS[inside]


def refuse_method(owner: str, name: str) -> None:
    """Raise the error for a method or attribute of `owner` that DeepSpeed has and xds does not implement."""
    why = MISSING_METHODS.get(name)
    if why is not None:
        raise NotCovered(_message(f"{owner}.{name}", why))


__all__ = ["Missing", "NotCovered", "placeholder", "reason_of", "refuse_method"]
