"""DeepSpeed's constants that scripts import: keys of configs and checkpoints, ports, names of launchers."""

from __future__ import annotations

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
# DeepSpeed's variable, in minutes. The engine's own limit is XDS_TIMEOUT_SECONDS.
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT = "train", "eval", "predict"

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

# keys of the config
ZERO_OPTIMIZATION = "zero_optimization"
ZERO_OPTIMIZATION_OPTIMIZER_STATES, ZERO_OPTIMIZATION_GRADIENTS, ZERO_OPTIMIZATION_WEIGHTS = 1, 2, 3
PLD_THETA, PLD_GAMMA = "theta", "gamma"
CURRICULUM_LEARNING, CURRICULUM_LEARNING_ENABLED = "curriculum_learning", "enabled"
DATA_EFFICIENCY, DATA_ROUTING = "data_efficiency", "data_routing"
DATA_SAMPLING, DATA_SAMPLING_NUM_WORKERS = "data_sampling", "num_workers"

# keys of the files of DeepSpeed's checkpoints
ARGS_KEY = "args"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BUFFER_NAMES = "buffer_names"
CAT_DIM = "cat_dim"
DS_VERSION = "ds_version"
FP32_FLAT_GROUPS = "fp32_flat_groups"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
PARAM = "param"
PARAM_GROUPS = "param_groups"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
PARAM_SHAPES = "param_shapes"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
PARTITION_COUNT = "partition_count"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
SUB_PARAM_SHAPE = "sub_param_shape"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
VOCAB_TENSOR = "vocab_tensor"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
ZERO_STAGE = "zero_stage"
