"""Rules of several keys: batch sizes, "auto", old names, what excludes what, and what is only noted."""

from __future__ import annotations

from typing import Any

import pytest

import xds
from xds.engine.config.batch import solve_batch
from xds.engine.config.config import Config, parse_config

SMALL = {"train_batch_size": 8, "gradient_clipping": 0}


def complaints(source: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(xds.ConfigError) as caught:
        parse_config(source, **more)
    return list(caught.value.complaints)


# ---- batch sizes -----------------------------------------------------------------------------------------


#  train, micro, steps, ranks -> train, micro, steps
SOLVED = [
    ((32, 4, 4, 2), (32, 4, 4)),
    ((32, 4, 0, 2), (32, 4, 4)),
    ((32, 0, 4, 2), (32, 4, 4)),
    ((0, 4, 4, 2), (32, 4, 4)),
    ((32, 0, 0, 2), (32, 16, 1)),
    ((0, 4, 0, 2), (8, 4, 1)),
    ((32768, 16, 0, 64), (32768, 16, 32)),
]


#  train, micro, steps, ranks -> what the one complaint says
REFUSED = [
    (
        (32, 4, 3, 2),
        "train_batch_size = 32: must equal train_micro_batch_size_per_gpu (4) x "
        "gradient_accumulation_steps (3) x world size (2) = 24; remove one of the three keys or "
        "set train_batch_size to 24",
    ),
    (
        (32, 5, 0, 2),
        "train_batch_size = 32: must be a multiple of train_micro_batch_size_per_gpu (5) x world "
        "size (2) = 10; set train_batch_size to 30 or 40, or change train_micro_batch_size_per_gpu "
        "or the number of ranks",
    ),
    (
        (32, 0, 3, 2),
        "train_batch_size = 32: must be a multiple of gradient_accumulation_steps (3) x world size "
        "(2) = 6; set train_batch_size to 30 or 36, or change the number of ranks",
    ),
    (
        (2, 0, 0, 4),
        "train_batch_size = 2: must be a multiple of the world size (4); set train_batch_size to "
        "4, or change the number of ranks",
    ),
    (
        (0, 0, 4, 2),
        "train_batch_size: no batch size is given (gradient_accumulation_steps = 4 alone is not "
        "enough); write train_batch_size (samples per step over all ranks) or "
        "train_micro_batch_size_per_gpu (samples per rank and forward)",
    ),
]


def test_any_two_of_the_batch_sizes_give_the_third() -> None:
    for given, wanted in SOLVED:
        assert solve_batch(*given) == (wanted, []), given
    for given, said in REFUSED:
        assert solve_batch(*given)[1] == [said]


def test_resolving_fills_the_sizes_and_is_idempotent() -> None:
    config = parse_config({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})
    resolved = config.resolve(8)
    assert (resolved.gradient_accumulation_steps, resolved.world_size) == (2, 8)
    assert resolved.resolve(8) is resolved and config.gradient_accumulation_steps == 0
    assert parse_config(config, world_size=8) == resolved
    for ranks, said in ((0, "world size = 0"), (5, "60 or 80")):
        with pytest.raises(xds.ConfigError, match=said):
            config.resolve(ranks)
    config = parse_config({**SMALL, "data_parallel_size": 4})
    assert config.resolve(4).train_micro_batch_size_per_gpu == 2
    with pytest.raises(xds.ConfigError, match="data_parallel_size = 4"):
        config.resolve(2)


# ---- "auto" ----------------------------------------------------------------------------------------------

FROM_A_TRAINER = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "AUTO", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_clipping": "AUTO",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
}


def test_auto_that_only_a_trainer_knows_is_refused_by_name() -> None:
    found = complaints(FROM_A_TRAINER)
    assert [said.split(" = ")[0] for said in found] == [
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    ]
    assert "(Trainer of transformers or Accelerator of accelerate); write" in found[0]
    assert "(Trainer of transformers)" in found[2]
    assert found[1] == (
        'optimizer.params.lr = "auto": only an integration can fill it (Trainer of transformers or Accelerator '
        "of accelerate); write a number, or try a value with `xds check --auto optimizer.params.lr=VALUE`"
    )
    for section in ("optimizer", "scheduler"):
        (said,) = complaints({**SMALL, section: {"type": "auto"}})
        assert said.startswith(f'{section}.type = "auto": only an integration')


def test_an_integration_fills_auto_and_nothing_else() -> None:
    filled = {
        "bfloat16.enabled": True,
        "optimizer.params.lr": 1e-4,
        "optimizer.params.betas": [0.9, 0.95],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.1,
        "scheduler.params.warmup_num_steps": 10,
        "scheduler.params.total_num_steps": 100,
        "zero_optimization.prefetch_bucket_size": 0.9 * 30 * 30,
        "zero_optimization.stage": 1,
        "some.other.key": 1,
    }
    config = parse_config(FROM_A_TRAINER, auto=filled, world_size=2)
    assert config.optimizer is not None
    assert config.optimizer.params == {
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    zero = config.zero_optimization
    assert config.bf16.enabled and zero.stage == 3 and zero.prefetch_bucket_size == 810
    assert (config.gradient_clipping, config.train_batch_size) == (1.0, 8)
    assert any("gradient_clipping" in note and "1.0" in note for note in config.notes)


def test_an_integrations_batch_is_used_where_the_file_has_none() -> None:
    filled = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = parse_config({}, auto={**filled, "train_batch_size": 99}, world_size=2)
    assert config.train_batch_size == 12
    assert parse_config({}, auto={"train_batch_size": 8}, world_size=2).train_batch_size == 8
    config = parse_config({"train_batch_size": 4}, auto=filled, world_size=2)
    assert config.train_micro_batch_size_per_gpu == 2 and config.gradient_accumulation_steps == 1
    config = parse_config({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})
    with pytest.raises(xds.ConfigError, match='"auto" for train_batch_size and train_micro'):
        config.resolve(4)


# ---- what has another meaning than it seems --------------------------------------------------------------


def test_old_names_and_short_forms() -> None:
    old = {"cpu_offload": True, "stage": 2, "stage3_gather_fp16_weights_on_model_save": False}
    config = parse_config({**SMALL, "zero_optimization": old})
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert parse_config({**SMALL, "zero_optimization": True}).zero_optimization.stage == 1
    plan = {"_orig_mod.*.up": "colwise"}  # a key of a free object is no comment
    assert parse_config({**SMALL, "tensor_parallel": {"plan": plan}}).tensor_parallel.plan == plan
    params = {"_lr": 2, "lr": 0.1}
    config = parse_config({**SMALL, "optimizer": {"_": 1, "type": "Adam", "params": params}})
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.1}
    for never in (float("inf"), "inf", None):
        assert parse_config({**SMALL, "steps_per_print": never}).steps_per_print is None
    assert parse_config({**SMALL, "zero_allow_untested_optimizer": 1}).zero_allow_untested_optimizer
    assert parse_config(
        {**SMALL, "zero_optimization": {"unit_min_numel": 0.9 * 30}}
    ).zero_optimization.unit_min_numel == round(27.0)
    for name in ("bf16", "BF16", "bfloat16", "torch.bfloat16"):
        config = parse_config({**SMALL, "communication_data_type": name})
        assert config.communication_data_type == "bf16"
    (said,) = parse_config(
        {**SMALL, "optimizer": {"type": "Adam", "torch_adam": True}}
    ).without_effect
    assert said[0] == "optimizer.torch_adam"


@pytest.mark.parametrize(
    "section",
    [{"stage": 2, "offload_param": {"device": "nvme"}}, {"stage": 1, "cpu_offload_param": True}],
)
def test_offload_param_below_stage_3_has_no_effect(section: dict[str, Any]) -> None:
    config = parse_config({**SMALL, "zero_optimization": section}, world_size=1)
    assert config.zero_optimization.offload_param.device == "none"
    ((path, why),) = config.without_effect
    assert path == "zero_optimization.offload_param.device"
    assert f"the stage is {section['stage']}" in why
    assert parse_config(config.as_dict(), world_size=1).as_dict() == config.as_dict()


@pytest.mark.parametrize(
    ("section", "enabled", "noted"),
    [
        ({}, True, "are recomputed"),
        ({"enabled": False}, False, None),
        ({"partition_activations": False, "number_checkpoints": None}, False, "flags are false"),
        ({"profile": False, "cpu_checkpointing": True}, True, "are recomputed"),
        ({"profile": False, "enabled": True}, True, "are recomputed"),
        ({"number_checkpoints": 4}, True, "are recomputed"),
        (None, False, None),
    ],
)
def test_activation_checkpointing_is_on_where_the_section_is_unless_all_its_flags_are_false(
    section: dict[str, Any] | None, enabled: bool, noted: str | None
) -> None:
    config = parse_config({**SMALL, "activation_checkpointing": section})
    assert config.activation_checkpointing.enabled is enabled
    assert [noted in note for note in config.notes if noted] == [True] * (noted is not None)


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("source", "note"),
    [
        ({"gradient_clipping": None}, "gradient_clipping is not given"),
        ({**BF16, "torch_autocast": {"enabled": True}}, "parameters are bf16 already"),
        (
            {"zero_optimization": {"stage": 0, "mics_shard_size": 2}},
            "mics_shard_size = 2 has no effect at stage 0",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_hierarchical_params_gather": True}},
            "mics_hierarchical_params_gather has no effect without",
        ),
        ({"pipeline": {"schedule": "zbv"}}, "pipeline.schedule"),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}},
            "offload_optimizer has no device, so nothing is offloaded",
        ),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}, "decoupled"),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            "weight_decay is 0.01, torch's",
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 10, "warmup_num_steps": 20},
                }
            },
            "never leaves its warm-up",
        ),
    ],
)
def test_an_effect_that_the_file_does_not_show_is_noted(source: dict[str, Any], note: str) -> None:
    assert not any(note in said for said in parse_config(SMALL).notes)
    (said,) = parse_config({**SMALL, **source}).notes
    assert note in said


def test_there_is_no_note_where_the_file_says_it() -> None:
    for params in (
        {"weight_decay": 0.0},
        {"weight_decay": 0.1, "adam_w_mode": False},
        {"weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False},
    ):
        assert parse_config({**SMALL, "optimizer": {"type": "Adam", "params": params}}).notes == ()


# ---- what excludes what ----------------------------------------------------------------------------------


def one_bit(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 100, **params}}}


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def compiled(stage: int = 0, **keys: Any) -> dict[str, Any]:
    return {"compile": {"enabled": True, **keys}, **zero(stage)}


def stages(**keys: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2, **keys}}


CPU = {"device": "cpu"}
FP32_NORMS = {**BF16, "data_types": {"keep_in_fp32_modules": ["norm"]}}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({**BF16, "bfloat16": {"enabled": True}}, "sets the same option as bf16"),
        ({**BF16, "data_types": {"param_dtype": "fp16"}}, "must be bf16, the precision that"),
        (
            {**FP32_NORMS, "torch_autocast": {"enabled": True}},
            "rounds what data_types.keep_in_fp32",
        ),
        (
            {**FP32_NORMS, **zero(3, zero_quantized_weights=True)},
            "rounds what data_types.keep_in_fp32",
        ),
        ({**BF16, "data_types": {"fp32_outputs": ["head"]}}, "which has no names; add them there"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "a dynamic loss scale never falls to 0"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "or set a fixed fp16.loss_scale"),
        ({"gradient_clipping": 1, **zero(2, compute_grad_norm=False)}, "clipping needs the norm"),
        ({"ops": {"native": False, "require": True}}, "ops.native = false"),
        ({"amp": {"enabled": True}}, "torch_autocast"),
        ({"sparse_attention": {"num_local_blocks": 3, "num_global_blocks": 2}}, "a multiple of"),
        (
            {"sparse_attention": {"num_different_global_patterns": 2}},
            "set different_layout_per_head to true",
        ),
        (
            {
                "sparse_attention": {
                    "num_different_global_patterns": 5,
                    "different_layout_per_head": True,
                }
            },
            "at most num_local_blocks / num_global_blocks",
        ),
        (
            {
                "sparse_attention": {
                    "attention": "unidirectional",
                    "horizontal_global_attention": True,
                }
            },
            "rows that see all blocks",
        ),
        (
            {"sparse_attention": {"mode": "variable", "global_block_end_indices": [1, 2]}},
            "as many entries",
        ),
        (
            {"sparse_attention": {"mode": "bslongformer", "global_block_end_indices": [0]}},
            "above its start",
        ),
        (
            {"sparse_attention": {}, "sequence_parallel_size": 2},
            "exchanges heads around the model's own",
        ),
        (
            {
                "sparse_attention": {"different_layout_per_head": True},
                "tensor_parallel": {"tp_size": 2},
            },
            "layouts are not cut",
        ),
        (
            {"float8": {"enabled": True}, "tensor_parallel": {"tp_size": 2}},
            "the slices of a weight would have scales of their own",
        ),
        ({"float8": {"recipe": "mxfp8"}}, "need a Blackwell GPU and a prototype of torchao"),
        ({"datastates_ckpt": {"host_cache_size": 1}}, "only one writer"),
        ({"weight_quantization": {"post_init_quant": {}}}, "only xds.init_inference"),
        # offload
        (zero(cpu_offload=True, offload_optimizer={"device": "nvme"}), "remove cpu_offload"),
        (zero(offload_optimizer={"device": "nvme"}), "needs a folder on a local disk"),
        (zero(offload_optimizer={"super_offload": True}), "it needs updates on the host"),
        (
            {
                **zero(offload_optimizer={**CPU, "super_offload": True}),
                "optimizer": {"type": "Lamb"},
            },
            "Lamb uses norms or products of whole tensors",
        ),
        # MiCS, ZeRO++, shared parameters
        (zero(mics_shard_size=1, offload_param=CPU), "offload_param is for sharded parameters"),
        (zero(mics_shard_size=4, zero_hpz_partition_size=2), "remove one of the two keys"),
        (
            zero(
                mics_shard_size=4, mics_hierarchical_params_gather=True, zero_quantized_weights=True
            ),
            "gathers in 8 bits have two levels already",
        ),
        ({**zero(2, mics_shard_size=2), **one_bit()}, "mics_shard_size = 2: OneBitAdam keeps"),
        (zero(2, zero_quantized_weights=True), "set stage to 3, or remove the key"),
        (zero(0, zero_quantized_gradients=True), "set stage to 1, 2 or 3"),
        (zero(zeropp_loco_param={"reset_T": 3}), "set zero_quantized_gradients to true"),
        (zero(shared_parameters=True), "at stage 3 no rank keeps all parameters"),
        # optimizers of one bit
        ({**zero(3), **one_bit()}, "zero_optimization.stage = 3: OneBitAdam sends"),
        ({**zero(2, offload_optimizer=CPU), **one_bit()}, "OneBitAdam computes its messages"),
        (
            {**one_bit(), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 101}}},
            "freeze_step = 100: the learning rate rises for 101 steps",
        ),
        (
            {
                **one_bit(),
                "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
            },
            "the learning rate rises for 2000 steps",
        ),
        # torch.compile
        ({"compile": {"disable": False}}, "compile.enabled to true"),
        (compiled(kwargs={"name": "x"}), "name is not one of them"),
        (compiled(dynamic=True, kwargs={"dynamic": False}), "repeats compile.dynamic"),
        (compiled(mode="max-autotune", kwargs={"options": {"dce": True}}), "not both"),
        (compiled(mode="max-autotune", backend="eager"), "compile.mode"),
        (compiled(3, mode="reduce-overhead"), "CUDA graphs"),
        (compiled(3, kwargs={"mode": "max-autotune"}), "CUDA graphs"),
        (compiled(3, kwargs={"options": {"triton.cudagraphs": True}}), "compile.kwargs.options"),
        (compiled(3, backend="cudagraphs"), "CUDA graphs"),
        # pipeline stages, tensor ranks
        (
            {**stages(activation_checkpoint_interval=2), "activation_checkpointing": {}},
            "recomputes every block already",
        ),
        (
            {**stages(), **zero(3, divergent_graphs=True)},
            "divergent_graphs = true: pipeline stages",
        ),
        ({**stages(), "managed_gradient_accumulation": False}, "so the engine counts them"),
        (
            {**stages(), "pipeline": {"stages": 2, "micro_batches": 3}},
            "micro_batches = 3: must equal gradient_accumulation_steps (4)",
        ),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, "write the number of ranks as tensor_para"),
        ({"tensor_parallel": {"tp_size": 2}, "optimizer": {"type": "Muon"}}, "cuts them"),
    ],
)
def test_what_does_not_go_together_is_one_sentence_with_a_remedy(
    source: dict[str, Any], says: str
) -> None:
    world_size = 2 if "gradient_accumulation_steps" in source else None
    (said,) = complaints({**SMALL, **source}, world_size=world_size)
    assert says in said


def test_limits_of_a_dynamic_scale_may_be_0_where_none_is() -> None:
    for key in ("min_loss_scale", "loss_scale_window"):
        for more in ({"loss_scale": 128}, {"enabled": False}):
            parse_config({**SMALL, "fp16": {"enabled": True, key: 0, **more}})
    parse_config({**SMALL, **zero(0, mics_shard_size=2), **one_bit()})
    config = Config.load({**SMALL, **zero(2, offload_optimizer=CPU), "pipeline": {"stages": 2}})
    assert config.pipeline.stages == 2


def test_shard_groups_must_divide_the_ranks_that_hold_the_same_parameters() -> None:
    sized = {"train_micro_batch_size_per_gpu": 1}
    (text,) = complaints({**sized, **zero(3, mics_shard_size=4)}, world_size=6)
    assert text == (
        "zero_optimization.mics_shard_size = 4: must divide the number of data-parallel ranks (6), so that "
        "every shard group has as many ranks; set it to 1 or 2 or 3 or 6, or start a multiple of 4"
    )
    source = {**sized, **zero(1, mics_shard_size=2), "pipeline": {"stages": 2}}
    assert "(3)" in complaints(source, world_size=6)[-1]
    source = {**sized, **zero(1, mics_shard_size=4), "sequence_parallel_size": 2}
    (text,) = complaints(source, world_size=6)
    assert "data-parallel and sequence ranks (6)" in text
    parse_config({**sized, **zero(0, mics_shard_size=4)}, world_size=6)


# ---- ranks that share a model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "world_size", "data_ranks"),
    [
        ({"pipeline": {"stages": 2}}, 6, 3),
        ({"pipeline": {"stages": 3}, "tensor_parallel": {"autotp_size": 2}}, 12, 2),
        ({"tensor_parallel": {"tp_size": 0}}, 6, 6),
        ({"sequence_parallel_size": 3}, 6, 2),
    ],
)
def test_data_ranks_are_what_the_ranks_of_a_model_leave(
    sections: dict[str, Any], world_size: int, data_ranks: int
) -> None:
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, **sections}
    config = parse_config(given, world_size=world_size)
    assert (config.world_size, config.data_parallel_ranks) == (world_size, data_ranks)
    assert config.train_batch_size == 2 * 8 * data_ranks
    assert config.resolve(world_size) is config


def test_a_number_of_ranks_that_cannot_be_shared_is_refused_with_the_ones_near_it() -> None:
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    (said,) = complaints({**given, "pipeline": {"stages": 3}}, world_size=8)
    assert said.startswith("pipeline.stages (3) x data = 8 ranks: ")
    assert "start 6 or 9 ranks" in said
    (said,) = complaints({**given, "tensor_parallel": {"tp_size": 2}}, world_size=3)
    assert "tensor_parallel.tp_size (2) x data = 3 ranks" in said
    rule, source = (
        "gradient_accumulation_steps (8) x {} (2) = 32",
        {**given, "train_batch_size": 64},
    )
    (said,) = complaints({**source, "pipeline": {"stages": 2}}, world_size=4)
    assert rule.format("data-parallel ranks") in said
    (said,) = complaints(source, world_size=2)
    assert rule.format("world size") in said
    (said,) = complaints(
        {**given, "pipeline": {"stages": 2}, "data_parallel_size": 4}, world_size=4
    )
    assert "data-parallel ranks (2); remove it or start 8" in said
