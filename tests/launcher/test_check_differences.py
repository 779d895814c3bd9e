"""`xds check` names what differs from DeepSpeed for the very file: each rule, where it applies."""

import json

import pytest

from xds.engine.config.config import Config, parse_config
from xds.engine.config.differences import ONLY_HERE, REMOVED, differences
from xds.launcher.check import JSON_KEY, main
from xds.utils.schema.section import Section, known_names, subsection

PLAIN = {  # as little differs as possible
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 0},
}
CHECKPOINTS = "checkpoints: are safetensors files"
DEEPSPEEDS = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level gradient_clipping
gradient_allreduce_op communication_data_type sequence_parallel_size seq_parallel_communication_data_type
zero_allow_untested_optimizer dataloader_drop_last optimizer.type optimizer.params scheduler.type
scheduler.params fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale bf16.enabled bf16.check_grad_overflow
comms_logger.enabled comms_logger.prof_all comms_logger.prof_ops comms_logger.verbose comms_logger.debug
flops_profiler.enabled flops_profiler.recompute_fwd_factor flops_profiler.profile_step
flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file
torch_autocast.enabled torch_autocast.dtype data_types.grad_accum_dtype data_types.param_dtype
zero_optimization.stage zero_optimization.overlap_comm zero_optimization.prefetch_bucket_size
zero_optimization.param_persistence_threshold zero_optimization.max_live_parameters
zero_optimization.max_reuse_distance zero_optimization.leaf_module.classes zero_optimization.leaf_module.names
zero_optimization.leaf_module.name_suffixes zero_optimization.offload_optimizer.device
zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.ratio
zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_optimizer.pin_memory
zero_optimization.offload_optimizer.super_offload zero_optimization.offload_param.device
zero_optimization.offload_param.nvme_path zero_optimization.offload_param.max_in_cpu
zero_optimization.compute_grad_norm
zero_optimization.offload_param.pin_memory zero_optimization.cpu_offload_param zero_optimization.cpu_offload
zero_optimization.cpu_offload_use_pin_memory zero_optimization.zero_quantized_weights
zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_hpz_partition_size
zero_optimization.zero_quantized_gradients activation_checkpointing.partition_activations
activation_checkpointing.cpu_checkpointing pipeline.stages pipeline.pipe_partitioned
pipeline.grad_partitioned pipeline.partition pipeline.seed_layers pipeline.activation_checkpoint_interval
tensor_parallel.partition_config tensor_parallel.tp_overlap_comm tensor_parallel.vocab_parallel_lm_head
aio.block_size aio.queue_depth checkpoint.tag_validation checkpoint.load_universal
tensorboard.enabled tensorboard.output_path tensorboard.job_name
wandb.enabled wandb.group wandb.team wandb.project csv_monitor.enabled csv_monitor.output_path
csv_monitor.job_name comet.enabled comet.samples_log_interval comet.project comet.workspace comet.api_key
comet.experiment_name comet.experiment_key comet.online comet.mode timers.throughput.enabled
timers.throughput.synchronized
"""


def merged(config: dict, more: dict) -> dict:
    both = dict(config)
    for key, value in more.items():
        is_both = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_both and key != "optimizer" else value
    return {key: value for key, value in both.items() if value is not ...}


def lines(more: dict) -> list[str]:
    data = merged(PLAIN, more)
    return differences(data, parse_config(data, one_replica=True))


def keys_of(model: type[Section], path: str = "") -> list[str]:
    found = []
    for name in model.model_fields:
        inner, here = subsection(model, name), f"{path}{name}"
        if name in model.results or here in ONLY_HERE or here in REMOVED:
            continue
        found += keys_of(inner, f"{here}.") if inner is not None else [here]
    return found


def test_every_key_is_known_to_deepspeed_or_listed_as_known_only_here():
    assert sorted(keys_of(Config)) == sorted(DEEPSPEEDS.split())


@pytest.mark.parametrize("path", [*ONLY_HERE, *REMOVED])
def test_the_listed_keys_exist_here(path):
    *sections, key = path.split(".")
    model = Config
    for name in sections:
        model = subsection(model, model.aliases.get(name, name))
    assert key in known_names(model)


def test_a_plain_config_differs_in_its_checkpoints_alone():
    (line,) = lines({})
    assert line.startswith(CHECKPOINTS)


@pytest.mark.parametrize(
    ("more", "start"),
    [
        ({"gradient_clipping": ...}, "gradient_clipping is not given: gradients are not clipped"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.overlap_comm is not given: true"),
        (
            {"zero_optimization": {"stage": 3}},
            "zero_optimization.max_reuse_distance is not given: 5e7",
        ),
        ({"gradient_accumulation_steps": 2}, "data_types.grad_accum_dtype is not given: gradients"),
        ({"wandb": {"enabled": True}}, 'wandb.project is not given: "xds" here'),
        ({"csv_monitor": {"enabled": True}}, 'csv_monitor.job_name is not given: "xds" here'),
        (
            {"activation_checkpointing": {}},
            "activation_checkpointing: the model's blocks are recomputed",
        ),
        (
            {"bf16": {"check_grad_overflow": False}},
            "bf16.check_grad_overflow: a step whose gradients are not finite raises",
        ),
        ({"bf16": {"enabled": False}}, "fp32: a step whose gradients are not finite raises"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {}}},
            "optimizer.type: DeepSpeed 0.19 has no 1-bit optimizers",
        ),
        (
            {
                "optimizer": {"type": "SGD", "params": {"lr": 1}},
                "zero_optimization": {"stage": 1, "overlap_comm": True},
            },
            "optimizer.type: DeepSpeed shards this optimizer only with zero_allow_untested",
        ),
        (
            {"optimizer": {"type": "rmsprop", "params": {}}},
            "optimizer.type: any case is read here; DeepSpeed needs torch's spelling",
        ),
        ({"scheduler": {"type": "warmuplr"}}, "scheduler.type: any case is read here"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "scheduler.params.warmup_num_steps: 0 is taken as 2 here",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0}}},
            "optimizer.params.max_grad_norm: without effect here; DeepSpeed refuses the key",
        ),
        (
            {
                "gradient_allreduce_op": "sum",
                "zero_optimization": {"stage": 3, "max_reuse_distance": 0},
            },
            'gradient_allreduce_op: "sum" is refused by DeepSpeed at stage 3',
        ),
        ({"communication_data_type": "bfloat16"}, "communication_data_type: DeepSpeed knows"),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype: DeepSpeed refuses another dtype",
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0.5}, "bf16": ...},
            "fp16.min_loss_scale: DeepSpeed takes whole numbers only",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "stage3_param_persistence_threshold": 1,
                    "stage3_max_reuse_distance": 0,
                }
            },
            "zero_optimization.param_persistence_threshold: whole units",
        ),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": False}},
            "zero_optimization.cpu_offload_use_pin_memory: sets pin_memory",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer: works at stage 0 as well",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 1,
                    "overlap_comm": True,
                    "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                }
            },
            "zero_optimization.offload_optimizer.ratio: DeepSpeed refuses a ratio below 1",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device: without effect below stage 3",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 5e8}},
            "zero_optimization.reduce_bucket_size: without effect here; the gradients of a unit",
        ),
        ({"elasticity": {"enabled": False}}, "elasticity: DeepSpeed 0.19 has removed it"),
        (
            {"zero_optimization": {"mics_shard_size": -1}},
            "zero_optimization.mics_shard_size: DeepSpeed 0.19 has removed it",
        ),
        ({"watch": {"enabled": True}}, "watch: only xds knows this key; DeepSpeed ignores it"),
        (
            {"zero_optimization": {"units": ["Block"]}},
            "zero_optimization.units: only xds knows this key; DeepSpeed refuses it",
        ),
        (
            {"zero_optimization": {"_why": "x"}},
            "zero_optimization._why: only xds knows this key; DeepSpeed refuses it",
        ),
        ({"train_batch_size": "auto"}, 'train_batch_size: "auto" is computed'),
    ],
)
def test_each_rule_gives_one_line_where_it_applies(more, start):
    found = [line for line in lines(more) if not line.startswith(CHECKPOINTS)]
    assert len(found) == 1 and found[0].startswith(start), found


def test_what_does_not_differ_is_not_named():
    more = {
        "_comment": "DeepSpeed ignores it too",
        "cuda_visible_devices": 0,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
        },
        "steps_per_print": None,
    }
    assert [line for line in lines(more) if not line.startswith(CHECKPOINTS)] == []


def test_check_prints_them_and_no_note_twice(tmp_path, capsys):
    path = tmp_path / "config.json"
    source = {
        "train_batch_size": 8,
        "activation_checkpointing": {},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "vocabulary_size": 8,
    }
    path.write_text(json.dumps(source))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    shown = out[out.index("\nAccepted without effect:") :]
    idle, differing = shown.split("\nDiffers from DeepSpeed 0.19:\n")
    assert "vocabulary_size" in idle and "reduce_bucket_size" not in idle
    heads = [line.split(":")[0].strip() for line in differing.splitlines()]
    assert heads == [
        "gradient_clipping is not given",
        "zero_optimization.overlap_comm is not given",
        "activation_checkpointing",
        "fp32",
        "checkpoints",
        "zero_optimization.reduce_bucket_size",
    ]
    assert "\nNotes:" not in out
    assert main([str(path), "--json"]) == 0
    in_json = json.loads(capsys.readouterr().out)[JSON_KEY]
    assert [f"  {line}" for line in in_json] == differing.splitlines()


def test_a_refused_file_shows_what_deepspeed_does_with_it(capsys):
    source = {"train_batch_size": 8, "foo": 1, "zero_optimization": {"stag": 1}, "amp": {}}
    assert main([json.dumps(source)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    differing = err.split("\nDiffers from DeepSpeed 0.19:\n")[1].splitlines()
    assert [line.strip().split(":")[0] for line in differing] == ["foo", "amp"]
    assert main(["{"]) == 2
    assert "Differs" not in capsys.readouterr().err
