"""`deepspeed.elasticity.constants`: keys of the section `elasticity`, and a scheduler's variable."""

from __future__ import annotations

ELASTICITY = "elasticity"
ENABLED = "enabled"
ENABLED_DEFAULT = False
MAX_ACCEPTABLE_BATCH_SIZE = "max_train_batch_size"
MICRO_BATCHES = "micro_batch_sizes"
MIN_GPUS = "min_gpus"
MAX_GPUS = "max_gpus"
NUM_GPUS_PER_NODE = "num_gpus_per_node"
MODEL_PARALLEL_SIZE = "model_parallel_size"
MIN_TIME = "min_time"
PREFER_LARGER_BATCH = "prefer_larger_batch"
IGNORE_NON_ELASTIC_BATCH_INFO = "ignore_non_elastic_batch_info"
VERSION = "version"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"

# a scheduler sets it to the section as JSON
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
