"""The modules of DeepSpeed, and the names in them that work here.

`NAMES` has, for each module, the file of this folder and its names there; "Theirs=ours" where they differ, and
":module" for a module that has another name too. `MODULES` has the other modules of DeepSpeed 0.19 and some
older ones: a name of theirs can be imported, and is refused when it is used (missing.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ALIAS = "deepspeed"
VERSION = "0.19.8"  # the release of DeepSpeed whose names, defaults and meanings are implemented

_ZERO = (
    ".xds.zero.features.external_params: register_external_parameter; params.zero: Init MiCS_Init "
    "GatheredParameters unregister_external_parameter; "
    "params.parameters: ZeroParamStatus ZeroParamType is_zero_param"
)
_CHECKPOINTING = (
    "library.activation_checkpointing: checkpoint non_reentrant_checkpoint configure is_configured reset "
    "CudaRNGStatesTracker get_cuda_rng_tracker _CUDA_RNG_STATE_TRACKER=_tracker detach_variable "
    "_MODEL_PARALLEL_RNG_TRACKER_NAME=MODEL_PARALLEL _set_cuda_rng_state=_set_state "
    "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed"
)
_SAFE = (
    "params.states: safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_grad safe_set_full_grad "
    "safe_get_full_optimizer_state safe_set_full_optimizer_state safe_get_local_fp32_param "
    "safe_set_local_fp32_param safe_get_local_grad safe_set_local_grad safe_get_local_optimizer_state "
    "safe_set_local_optimizer_state"
)
_LEAVES = (
    "params.leaves: get_z3_leaf_modules set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module"
)
_LOG = "library.log: logger log_dist set_log_level_from_string"
_ACCELERATOR = "library.accelerator: get_accelerator"
_LAYERS = "training.pipeline: PipelineModule; .xds.pipe.layer_specs: LayerSpec TiedLayerSpec"
_TOPOLOGY = (
    "training.topology: ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology "
    "PipelineParallelGrid"
)
_LOADERS = ".xds.engine.data.loaders: RepeatingLoader; library.small: DeepSpeedDataLoader"
_CHECKPOINT_CONSTANTS = (
    "constants: DS_VERSION BUFFER_NAMES FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES PARAM_SHAPES "
    "OPTIMIZER_STATE_DICT BASE_OPTIMIZER_STATE SINGLE_PARTITION_OF_FP32_GROUPS FP32_FLAT_GROUPS "
    "PARTITION_COUNT ZERO_STAGE PARAM PARAM_GROUPS PARAM_SLICE_MAPPINGS PARAM_N_SUB_PARAMS "
    "SUB_PARAM_SHAPE CAT_DIM VOCAB_TENSOR ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE UNIVERSAL_CHECKPOINT_INFO "
    "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS "
    "PIPELINE_REPLICATED_PARAMETER_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS "
    "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS"
)
_COMM = (
    "library.comm: init_distributed is_initialized get_local_rank get_world_group configure "
    "allgather_fn all_gather_into_tensor reduce_scatter_tensor all_to_all_single; "
    "start: log_summary; .torch.distributed: "
    "ReduceOp ProcessGroup P2POp get_rank get_world_size get_global_rank new_group destroy_process_group "
    "is_available get_backend barrier monitored_barrier broadcast broadcast_object_list all_reduce reduce "
    "all_gather all_gather_object gather scatter reduce_scatter send recv isend irecv batch_isend_irecv "
    "all_to_all"
)

_LAYOUTS = (
    ".xds.ops.sparse_attention.layouts: SparsityConfig DenseSparsityConfig=Dense FixedSparsityConfig=Fixed "
    "VariableSparsityConfig=Variable BigBirdSparsityConfig=BigBird BSLongformerSparsityConfig=BSLongformer "
    "LocalSlidingWindowSparsityConfig=LocalSlidingWindow"
)
_SPARSE = ".xds.ops.sparse_attention.modules: "

_COMPRESS = ".xds.engine.model.compressed_training: init_compression redundancy_clean student_initialization"
NAMES: dict[str, str] = {
    "": "start: initialize tp_model_init add_config_arguments; stand_in: __version__ __version_major__ "
    "__version_minor__ __version_patch__ __git_hash__ __git_branch__; training.engine: DeepSpeedEngine; "
    "training.optimizer: DeepSpeedOptimizer; training.pipeline: PipelineEngine PipelineModule; "
    "config: DeepSpeedConfig DeepSpeedConfigError; library.small: DeepSpeedDataLoader OnDevice; "
    "library.comm: init_distributed; library.accelerator: get_accelerator; library.log: logger log_dist; "
    "library.inference: init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config; "
    "dist=:comm",
    "accelerator": _ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "accelerator.cpu_accelerator": "library.accelerator: CPU_Accelerator",
    "accelerator.cuda_accelerator": "library.accelerator: CUDA_Accelerator",
    "accelerator.hpu_accelerator": "library.accelerator: HPU_Accelerator",
    "accelerator.mlu_accelerator": "library.accelerator: MLU_Accelerator",
    "accelerator.mps_accelerator": "library.accelerator: MPS_Accelerator",
    "accelerator.npu_accelerator": "library.accelerator: NPU_Accelerator",
    "accelerator.xpu_accelerator": "library.accelerator: XPU_Accelerator",
    "checkpoint": _CHECKPOINT_CONSTANTS,
    "checkpoint.constants": _CHECKPOINT_CONSTANTS,
    "checkpoint.deepspeed_checkpoint": "constants: ARGS_KEY",
    "checkpoint.ds_to_universal": "params.universal: main parse_arguments",
    "checkpoint.utils": "training.checkpoints: clone_tensors_for_torch_save",
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression": f"{_COMPRESS}; .xds.engine.model.compressed_training: "
    "compression_scheduler=CompressionScheduler; .xds.compression.training.reduction: convert_conv1d_to_linear",
    "compression.compress": _COMPRESS,
    "compression.helper": ".xds.compression.training.reduction: convert_conv1d_to_linear; "
    "library.small: recursive_getattr recursive_setattr",
    "compression.scheduler": ".xds.engine.model.compressed_training: "
    "compression_scheduler=CompressionScheduler",
    "constants": "constants: TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "env_report": "library.small: main=env_report cli_main=env_report",
    "git_version_info": "library.small: version git_hash git_branch installed_ops torch_info accelerator_name",
    "inference": "library.inference: DeepSpeedInferenceConfig InferenceEngine",
    "inference.config": "library.inference: DeepSpeedInferenceConfig; config: DtypeEnum",
    "inference.engine": "library.inference: InferenceEngine",
    "launcher.runner": "launcher: main EXPORT_ENVS DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE",
    "moe.experts": "library.moe: Experts",
    "moe.layer": "library.moe: MoE MOELayer TopKGate Experts",
    "moe.sharded_moe": "library.moe: MOELayer TopKGate",
    "moe.utils": "library.moe: has_moe_layers is_moe_param split_params_into_shared_and_expert_params "
    "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
    "is_moe_param_group configure_moe_param_groups MoE",
    "ops": "library.ops: __compatible_ops__=COMPATIBLE_OPS",
    "ops.adam": "library.ops: FusedAdam DeepSpeedCPUAdam",
    "ops.adam.cpu_adam": "library.ops: DeepSpeedCPUAdam",
    "ops.adam.fused_adam": "library.ops: FusedAdam",
    "ops.adagrad": "library.ops: DeepSpeedCPUAdagrad",
    "ops.adagrad.cpu_adagrad": "library.ops: DeepSpeedCPUAdagrad",
    "ops.lamb": "library.ops: FusedLamb",
    "ops.lamb.fused_lamb": "library.ops: FusedLamb",
    "ops.lion": "library.ops: FusedLion DeepSpeedCPULion",
    "ops.lion.cpu_lion": "library.ops: DeepSpeedCPULion",
    "ops.lion.fused_lion": "library.ops: FusedLion",
    "ops.sparse_attention": _LAYOUTS
    + "; "
    + _SPARSE
    + "SparseSelfAttention BertSparseSelfAttention "
    "SparseAttentionUtils",
    "ops.sparse_attention.bert_sparse_self_attention": f"{_SPARSE}BertSparseSelfAttention",
    "ops.sparse_attention.sparse_attention_utils": f"{_SPARSE}SparseAttentionUtils",
    "ops.sparse_attention.sparse_self_attention": f"{_SPARSE}SparseSelfAttention",
    "ops.sparse_attention.sparsity_config": _LAYOUTS,
    "ops.op_builder": "library.ops: OpBuilder CUDAOpBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder "
    "FusedAdamBuilder FusedLambBuilder FusedLionBuilder UtilsBuilder AsyncIOBuilder",
    "ops.op_builder.all_ops": "library.ops: ALL_OPS",
    "ops.op_builder.builder": "library.ops: OpBuilder CUDAOpBuilder",
    "pipe": _LAYERS + "; training.pipeline: DualPipeVModule; training.topology: ProcessTopology",
    "runtime": "",
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": "training.optimizer: DeepSpeedOptimizer ZeROOptimizer",
    "runtime.bf16_optimizer": "training.optimizer: BF16_Optimizer",
    "runtime.checkpoint_engine": "library.small: TorchCheckpointEngine",
    "runtime.checkpoint_engine.torch_checkpoint_engine": "library.small: TorchCheckpointEngine",
    "runtime.config": "config: DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER ADAMW_OPTIMIZER "
    "LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER "
    "ZERO_ONE_ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS TORCH_ADAM_PARAM ADAM_W_MODE_PARAM=ADAM_W_MODE "
    "DtypeEnum",
    "runtime.constants": "constants: ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT PLD_THETA PLD_GAMMA",
    "runtime.data_pipeline.constants": "constants: CURRICULUM_LEARNING CURRICULUM_LEARNING_ENABLED "
    "DATA_SAMPLING DATA_SAMPLING_NUM_WORKERS DATA_EFFICIENCY DATA_ROUTING",
    "runtime.data_pipeline.data_routing.helper": "library.dropping: convert_to_random_ltd "
    "save_without_random_ltd remove_random_ltd_state_dict",
    "runtime.data_pipeline.data_routing.scheduler": "library.dropping: RandomLTDScheduler",
    "runtime.data_pipeline.curriculum_scheduler": "library.curriculum: CurriculumScheduler",
    "runtime.data_pipeline.data_sampling.data_analyzer": "library.data: DataAnalyzer DistributedDataAnalyzer",
    "runtime.data_pipeline.data_sampling.indexed_dataset": "library.data: MMapIndexedDataset "
    "MMapIndexedDatasetBuilder",
    "runtime.data_pipeline.data_sampling.utils": "library.data: create_mmap_dataset_builder "
    "close_mmap_dataset_builder find_fit_int_dtype",
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": ".xds.engine.data.length_batches: "
    "batch_by_seqlens scale_lr; library.data: lr_scheduler_for_variable_batch_size "
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "runtime.dataloader": _LOADERS,
    "runtime.engine": "training.engine: DeepSpeedEngine; training.optimizer: DeepSpeedOptimizer; "
    "library.small: DeepSpeedDataLoader",
    "runtime.fp16.fused_optimizer": "training.optimizer: FP16_Optimizer",
    "runtime.fp16.unfused_optimizer": "training.optimizer: FP16_UnfusedOptimizer",
    "runtime.fp16.loss_scaler": "training.optimizer: LossScalerBase LossScaler DynamicLossScaler",
    "runtime.lr_schedules": ".xds.engine.optim.schedules: LRRangeTest OneCycle WarmupLR WarmupDecayLR "
    "WarmupCosineLR; constants: VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR "
    "WARMUP_COSINE_LR",
    "runtime.optimizer": "training.optimizer: DeepSpeedOptimizer",
    "runtime.pipe": _LAYERS + "; training.topology: ProcessTopology",
    "runtime.pipe.dualpipev": "training.pipeline: DualPipeVModule",
    "runtime.pipe.engine": "training.pipeline: PipelineEngine; training.engine: DeepSpeedEngine",
    "runtime.pipe.module": _LAYERS + "; training.pipeline: DualPipeVModule",
    "runtime.pipe.schedule": "training.pipeline: PipeInstruction BufferOpInstruction OptimizerStep ReduceGrads "
    "ReduceTiedGrads CommitP2P LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad "
    "RecvGrad",
    "runtime.pipe.topology": _TOPOLOGY,
    "runtime.progressive_layer_drop": "library.dropping: ProgressiveLayerDrop",
    "runtime.sequence_parallel.ulysses_sp": "library.tiles: TiledFusedLogitsLoss TiledMLP; "
    "library.sequences: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    "runtime.utils": "library.small: see_memory_usage PartitionedTensor set_random_seed move_to_device "
    "is_model_parallel_parameter",
    "runtime.zero": _ZERO,
    "runtime.zero.config": "config: DeepSpeedZeroConfig ZeroStageEnum OffloadDeviceEnum; "
    "constants: ZERO_OPTIMIZATION ZERO_OPTIMIZATION_OPTIMIZER_STATES "
    "ZERO_OPTIMIZATION_GRADIENTS ZERO_OPTIMIZATION_WEIGHTS",
    "runtime.zero.constants": "constants: ZERO_OPTIMIZATION ZERO_OPTIMIZATION_OPTIMIZER_STATES "
    "ZERO_OPTIMIZATION_GRADIENTS ZERO_OPTIMIZATION_WEIGHTS",
    "runtime.zero.offload_config": "config: OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.zero.parameter_offload": "params.parameters: DeepSpeedZeRoOffload",
    "runtime.zero.partition_parameters": _ZERO,
    "runtime.zero.stage3": "training.optimizer: DeepSpeedZeroOptimizer_Stage3; params.estimate: "
    "estimate_zero3_model_states_mem_needs_all_live",
    "runtime.zero.stage_1_and_2": "training.optimizer: DeepSpeedZeroOptimizer; params.estimate: "
    "estimate_zero2_model_states_mem_needs_all_live",
    "runtime.zero.utils": "params.zero: ZeRORuntimeException is_zero_supported_optimizer; "
    "params.parameters: is_zero_param",
    "sequence.layer": "library.sequences: DistributedAttention",
    "stand_in": "stand_in: activate is_active is_asked_for",
    "utils": f"{_SAFE}; {_LEAVES}; {_LOG}; {_ACCELERATOR}; {_LOADERS}; library.small: OnDevice "
    "instrument_w_nvtx; library.comm: init_distributed",
    "utils.groups": "library.groups: get_data_parallel_group get_data_parallel_world_size "
    "get_data_parallel_rank get_model_parallel_world_size get_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
    "_get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank "
    "_get_model_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_world_size "
    "_get_sequence_parallel_rank _get_sequence_data_parallel_group _get_sequence_data_parallel_world_size "
    "_get_sequence_data_parallel_rank _get_data_parallel_group_ranks _get_broadcast_src_rank "
    "_clone_world_group",
    "utils.init_on_device": "library.small: OnDevice",
    "utils.logging": _LOG + "; library.log: log_levels warning_once print_rank_0",
    "utils.nvtx": "library.small: instrument_w_nvtx",
    "utils.tensor_fragment": _SAFE,
    "utils.timer": "library.timer: SynchronizedWallClockTimer ThroughputTimer FORWARD_MICRO_TIMER "
    "FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
    "BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER STEP_MICRO_TIMER "
    "STEP_GLOBAL_TIMER",
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": "params.zero_to_fp32: main get_fp32_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
    "load_state_dict_from_zero_checkpoint",
    "zero": _ZERO,
}

MODULES = """
checkpoint.{reshape_3d_utils,reshape_meg_2d,reshape_utils,universal_checkpoint,zero_checkpoint}
comm.{backend,ccl,config,constants,reduce_op,torch,utils}
compression.{basic_layer,config,constants,utils}
elasticity.{config,constants,elastic_agent,elasticity,utils}
accelerator.abstract_accelerator launcher.{constants,launch,launcher_helper,multinode_runner}
linear.{config,context_manager,optimized_linear,quantization}
moe.{ep_count,ep_experts,ep_kernels,ep_repack,ep_router,ep_tp_dispatch,fused_expert_layout,mappings}
monitor.{comet,config,csv_monitor,monitor,tensorboard,utils,wandb}
nebula.{config,constants}
nvme
ops.adagrad ops.adam.multi_tensor_apply ops.aio ops.compile ops.deepspeed4science ops.fp_quantizer ops.gds
ops.lamb ops.lion ops.quantizer ops.random_ltd
ops.sparse_attention.{matmul,softmax,trsrc} ops.transformer.{transformer,inference} ops.triton
profiling.{config,constants} profiling.flops_profiler.profiler
runtime.activation_checkpointing.{config,offload_activations}
runtime.checkpoint_engine.{checkpoint_engine,decoupled_checkpoint_engine,fast_checkpoint_engine,utils}
runtime.checkpoint_engine.nebula_checkpoint_engine
runtime.comm.{coalesced_collectives,compressed,mpi,nccl} runtime.compression.cupy
runtime.{compiler,config_utils,csr_tensor,eigenvalue,hybrid_engine,hybrid_engine_graph,keep_in_fp32,memory}
runtime.{model_checkpointing,precision_config,quantize,sparse_tensor,state_dict_factory}
runtime.{superoffload,torch_autocast,weight_quantizer,zenflow,rollout,chunked_cross_entropy,python_gc}
runtime.data_pipeline.config
runtime.data_pipeline.data_routing.{basic_layer,utils}
runtime.data_pipeline.data_sampling.data_sampler
runtime.domino.{async_linear,transformer}
runtime.fp16.onebit.{adam,lamb,zoadam} runtime.fp16.{onebit_adam,onebit_lamb}
runtime.pipe.p2p
runtime.sequence_parallel.parallel_state_sp
runtime.swap_tensor.{aio_config,async_swapper,constants,optimizer_utils,partitioned_optimizer_swapper}
runtime.swap_tensor.{partitioned_param_swapper,pipelined_optimizer_swapper,utils}
runtime.tensor_parallel.{config,init_utils,tp_manager}
runtime.zero.{contiguous_memory_allocator,leaf_module_config,linear,mics,mics_utils,muon,offload_states}
runtime.zero.{partitioned_param_coordinator,partitioned_param_profiler,stage1,stage2,tiling,test}
sequence.{auto_sp,cross_entropy,fpdt_layer,vocab_parallel_ops}
utils.{bwc,comms_logging,config,debug,exceptions,mixed_precision_linkage,module_utils,numa,pin_memory,torch}
utils.{static_cache,types,zero_to_torch} version
"""
# of these every module is known
TREES = ("autotuning", "compile", "inference", "model_implementations", "module_inject")


@cache
def modules() -> frozenset[str]:
    """All known modules, without "deepspeed." in front; "" is the package itself."""
    found = set(NAMES) | set(TREES)
    for word in MODULES.split():
        head, _, rest = word.partition("{")
        ends, _, tail = rest.partition("}")
        found |= {f"{head}{end}{tail}" for end in ends.split(",")}
    for name in list(found):
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found)


def _is_in_tree(name: str) -> bool:
    return name.partition(".")[0] in TREES


def is_module(name: str) -> bool:
    """DeepSpeed has, or had, this module."""
    return name in modules() or _is_in_tree(name)


def is_package(name: str) -> bool:
    """Modules can be inside."""
    return bool(modules_in(name)) or _is_in_tree(name)


@cache
def modules_in(inside: str) -> frozenset[str]:
    """The names of the known modules directly in one."""
    found = (name.rpartition(".") for name in modules() if name)
    return frozenset(own for parent, _, own in found if parent == inside)


@cache
def listed(inside: str) -> dict[str, str]:
    """The names of a module that work -> "file:name"."""
    found: dict[str, str] = {}
    for part in filter(None, NAMES.get(inside, "").split("; ")):
        file, colon, words = part.partition(": ")
        if not colon:
            theirs, _, module = part.partition("=:")
            found[theirs] = f":{module}"
            continue
        for word in words.split():
            theirs, _, ours = word.partition("=")
            found[theirs] = f"{file}:{ours or theirs}"
    return found


def main_file(inside: str) -> str:
    """The file that has most of a module's names; for modules without one, this file."""
    files = [one.partition(":")[0] for one in NAMES.get(inside, "").split("; ") if ": " in one]
    own = [file for file in files if not file.startswith(".")]
    folder = Path(__file__).parent
    return str(folder.joinpath(*own[0].split(".")).with_suffix(".py") if own else Path(__file__))


__all__ = ["NAMES", "is_module", "is_package", "listed", "main_file", "modules_in"]
