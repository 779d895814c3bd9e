"""Configs as people write them: each is accepted, or refused for the stated reason."""

import json
import re

import pytest

import xds
from xds.engine.config.config import parse_config

ADAM = {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.85, 0.99], "eps": 1e-7}}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2}
SIZES = {"train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 5}
AUTO_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
AUTO_ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
}
FILLED = {
    "train_micro_batch_size_per_gpu": 2,
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 1e-4,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 1e-4,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}

ACCEPTED = {
    "zero 0 alone": {**SIZES, "zero_optimization": {"stage": 0}},
    "zero 1 with buckets": {
        **SIZES,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 3e8, "allgather_bucket_size": 3e8},
    },
    "zero 2, every switch": {
        **SIZES,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "contiguous_gradients": False,
            "round_robin_gradients": True,
        },
    },
    "zero 3, every size": {
        **SIZES,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 1e8,
            "stage3_max_reuse_distance": 1e8,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e4,
            "stage3_model_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e12,
        },
    },
    "fp16 with a schedule": {
        **SIZES,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 9}},
        "gradient_clipping": 0.5,
        "fp16": {**FP16, "min_loss_scale": 1, "auto_cast": True},
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    },
    "fp16 switched off": {**SIZES, "fp16": {**FP16, "enabled": False}},
    "pre-divided": {**SIZES, "prescale_gradients": True, "gradient_predivide_factor": 4},
    "checkpointing of Megatron": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "activation_checkpointing": {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
        },
    },
    "Lamb": {
        **SIZES,
        "optimizer": {
            "type": "Lamb",
            "params": {"lr": 1e-3, "bias_correction": False, "max_coeff": 0.5, "min_coeff": 0.05},
        },
    },
    "legacy keys": {
        **SIZES,
        "disable_allgather": True,
        "cuda_visible_devices": 0,
        "zero_allow_untested_optimizer": True,
    },
    "sequence dtype": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        **AUTO_SIZES,
        "seq_parallel_communication_data_type": "bf16",
    },
    "a trainer's zero 2": {
        **AUTO_SIZES,
        "fp16": {**FP16, "enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
    },
    "a trainer's zero 3": {
        **AUTO_SIZES,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
    },
    "an accelerator's template": {
        **AUTO_SIZES,
        "fp16": {**FP16, "initial_scale_power": 12},
        "optimizer": AUTO_ADAM,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
    },
    "monitors": {
        **SIZES,
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "a"},
        "wandb": {"enabled": False, "team": None, "group": "g", "project": "p"},
        "csv_monitor": {"enabled": True, "output_path": "csv"},
    },
}

REFUSED = {
    "eigenvalue.enabled": {
        **SIZES,
        "eigenvalue": {"enabled": True, "verbose": True, "tol": 1e-2, "model_name": "m"},
        "quantize_training": {"quantize_bits": {"start_bits": 8, "target_bits": 4}},
    },
    "quantize_training.enabled": {
        **SIZES,
        "quantize_training": {"enabled": True, "quantize_algo": {"q_type": "symmetric"}},
    },
    "compression_training.weight_quantization.shared_parameters.enabled": {
        **SIZES,
        "compression_training": {
            "layer_reduction": {"enabled": False, "keep_number_layer": 3, "teacher_layer": [1]},
            "weight_quantization": {
                "shared_parameters": {
                    "enabled": True,
                    "quantize_groups": 8,
                    "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.5},
                },
                "different_groups": {"g": {"params": {"start_bits": 8}, "modules": ["m"]}},
            },
            "head_pruning": {"shared_parameters": {"enabled": False, "num_heads": 8}},
        },
    },
    "compression_training.channel_pruning.shared_parameters.enabled": {
        **SIZES,
        "compression_training": {
            "channel_pruning": {"shared_parameters": {"enabled": True, "method": "topk"}}
        },
    },
    "data_efficiency.enabled": {
        **SIZES,
        "data_efficiency": {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
        },
    },
    "autotuning.enabled": {
        **AUTO_SIZES,
        "autotuning": {"enabled": True, "fast": True, "arg_mappings": {"a ": "--a"}},
    },
    "progressive_layer_drop.enabled": {
        **SIZES,
        "progressive_layer_drop": {"enabled": True, "theta": 0.7, "gamma": 0.01},
    },
    "compile.deepcompile": {**SIZES, "compile": {"deepcompile": True}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    config = parse_config(json.dumps(ACCEPTED[name]), auto=FILLED, world_size=4)
    product = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 4
    assert config.train_batch_size == product


@pytest.mark.parametrize("path", REFUSED)
def test_refused_for_one_stated_reason(path):
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(json.dumps(REFUSED[path]), auto=FILLED, world_size=4)
    (complaint,) = caught.value.complaints
    assert complaint.startswith(f"{path} = ")
    assert re.search("not supported yet", complaint)
