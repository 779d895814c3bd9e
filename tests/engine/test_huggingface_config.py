"""Configs filled from TrainingArguments: "auto", missing keys, and contradictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from huggingface_runs import arguments, config_of, llama, trainer
from transformers import HfArgumentParser

import xds
from xds.engine.integrations.given import Source, hidden_size_of, sized_by
from xds.engine.integrations.huggingface import Trainer, TrainingArguments
from xds.engine.integrations.optional import need
from xds.engine.integrations.trainer_values import argument_values, schedule_values

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn about themselves
AUTO_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
LOSS_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
PARAMS = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
WIDTHS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
# the shapes in which such files are published
PUBLISHED: dict[str, dict[str, Any]] = {
    "micro-batch alone": {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}},
    "both precisions, stage 2": {
        **AUTO_SIZES,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", **LOSS_SCALE, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8},
    },
    "widths, stage 3": {
        **AUTO_SIZES,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, **WIDTHS},
    },
    "optimizer and schedule": {
        **AUTO_SIZES,
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": PARAMS},
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "steps_per_print": 2000,
    },
    "some of the optimizer": {
        **AUTO_SIZES,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
    },
}


def filled(source: Any, args: Any, steps: int | None = 50) -> xds.Config:
    written = Source(source)
    values = {**argument_values(written, args), **sized_by(hidden_size_of(llama()))}
    if written.has_section("scheduler"):
        values |= schedule_values(args, steps)
    return written.filled(values)


def complaints(source: Any, args: Any, steps: int | None = 50) -> tuple[str, ...]:
    with pytest.raises(xds.ConfigError) as caught:
        filled(source, args, steps)
    return caught.value.complaints


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_filled(name, tmp_path):
    config = filled(PUBLISHED[name], arguments(tmp_path, 1, bf16=name != "micro-batch alone"))
    assert config.train_micro_batch_size_per_gpu == 4
    assert config.gradient_accumulation_steps == 2
    assert config.gradient_clipping == 0.5
    assert config.bf16.enabled == (name != "micro-batch alone")
    assert not config.fp16.enabled
    assert config.resolve(1).train_batch_size == 8
    assert not [note for note in config.notes if '"auto"' in note]


def test_every_value_comes_from_its_argument(tmp_path):
    args = arguments(tmp_path, 1, adam_beta1=0.8, adam_epsilon=1e-7, warmup_steps=0.1)
    config = filled(PUBLISHED["optimizer and schedule"], args)
    assert config.optimizer.params == {
        "lr": 1e-2,
        "betas": (0.8, 0.999),
        "eps": 1e-7,
        "weight_decay": 0.1,
    }
    assert config.scheduler.params == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-2,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }


def test_sizes_follow_the_models_width(tmp_path):
    zero = filled(PUBLISHED["widths, stage 3"], arguments(tmp_path, 1)).zero_optimization
    assert zero.prefetch_bucket_size == 230  # 0.9 x 16 x 16, rounded down
    assert zero.param_persistence_threshold == 160


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SimpleNamespace(hidden_size=8), 8),
        (SimpleNamespace(hidden_sizes=[8, 32, 16]), 32),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=24)), 24),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_a_models_width_is_found_where_its_config_has_it(config, size):
    assert hidden_size_of(SimpleNamespace(config=config)) == size


def test_what_the_config_leaves_out_comes_from_the_arguments(tmp_path):
    config = filled(
        {"optimizer": {"type": "Lion"}, "bfloat16": {}}, arguments(tmp_path, 1, bf16=True)
    )
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 2)
    assert config.gradient_clipping == 0.5
    assert config.bf16.enabled
    assert config.optimizer.params == {"lr": 1e-2, "weight_decay": 0.1}  # Lion's own betas


def test_autocast_is_filled_where_the_config_chose_it(tmp_path):
    source = {"torch_autocast": {"enabled": "auto", "dtype": "auto"}, "bf16": {"enabled": "auto"}}
    config = filled(source, arguments(tmp_path, 1, bf16=True))
    assert config.torch_autocast.enabled and config.torch_autocast.dtype == "bf16"
    assert not config.bf16.enabled
    assert not filled(source, arguments(tmp_path, 1)).torch_autocast.enabled


def test_compilation_of_the_arguments_reaches_the_config(tmp_path):
    args = arguments(tmp_path, 1, torch_compile=True, torch_compile_backend="aot_eager")
    section = filled({}, args).compile
    assert (section.enabled, section.backend) == (True, "aot_eager")


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"train_micro_batch_size_per_gpu": 3},
        "train_micro_batch_size_per_gpu = 3: but TrainingArguments.per_device_train_batch_size = 4; "
        'make the two equal, or write "auto" in the config',
    ),
    ({"gradient_accumulation_steps": 4}, "TrainingArguments.gradient_accumulation_steps = 2"),
    ({"train_batch_size": 64}, "x ranks (4 x 2 x 1) = 8"),
    ({"gradient_clipping": 1.0}, "TrainingArguments.max_grad_norm = 0.5"),
    ({"bf16": {"enabled": True}}, "TrainingArguments.bf16 = false"),
    ({"fp16": {"enabled": True}}, "TrainingArguments.fp16 = false"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
        "TrainingArguments.learning_rate = 0.01",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
        "[TrainingArguments.adam_beta1, adam_beta2] = [0.9, 0.999]",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
        "TrainingArguments.warmup_steps = 2",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
        "the number of training steps = 50",
    ),
]


@pytest.mark.parametrize(("source", "words"), CONTRADICTIONS)
def test_a_contradiction_names_both_sides(source, words, tmp_path):
    (complaint,) = complaints(source, arguments(tmp_path, 1))
    assert words in complaint


def test_all_complaints_come_at_once(tmp_path):
    source = {"train_batch_size": 3, "gradient_clipping": 2, "zero_optimization": {"stage": 5}}
    found = complaints(source, arguments(tmp_path, 1))
    assert len(found) >= 3


# -- the Trainer ----------------------------------------------------------------------------------------------


def test_a_wrong_config_is_refused_when_the_trainer_is_made(tmp_path):
    with pytest.raises(xds.ConfigError, match="max_grad_norm = 0.5"):
        trainer(tmp_path, xds_config=config_of(2, gradient_clipping=1.0))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True with xds_config"),
        ({"fsdp": "full_shard"}, "fsdp"),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused(more, words, tmp_path):
    args = arguments(tmp_path, 1, xds_config=config_of(0))
    for name, value in more.items():
        setattr(args, name, value)
    with pytest.raises(xds.UsageError, match=words):
        Trainer(llama(), args)


def test_a_config_given_twice_is_refused(tmp_path):
    args = arguments(tmp_path, 1, xds_config=config_of(0))
    with pytest.raises(xds.UsageError, match="keep one of them"):
        Trainer(llama(), args, xds_config=config_of(0))


def test_an_optimizer_beside_the_configs_is_refused(tmp_path):
    import torch

    model = llama()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_of(0, optimizer={"type": "AdamW", "params": PARAMS})
    done = trainer(tmp_path, model=model, xds_config=config, optimizers=(own, None))
    with pytest.raises(xds.UsageError, match="section optimizer, and the Trainer got"):
        done.train()


def test_the_config_can_be_given_on_the_command_line(tmp_path):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--xds_config", "zero3.json"]
    )
    assert args.xds_config == "zero3.json"
    assert args.to_dict()["xds_config"] == "zero3.json"


def test_without_a_config_it_is_the_plain_trainer(tmp_path):
    done = trainer(tmp_path, max_steps=1)
    done.train()
    done.save_model()
    assert done.engine is None
    assert (tmp_path / "model.safetensors").is_file()


def test_a_package_that_is_missing_is_named_with_its_install_line():
    with pytest.raises(
        xds.UsageError, match=r'pip install -e "\.\[huggingface\]" in the xds checkout'
    ):
        need("a_package_that_nobody_has", "xds", "huggingface")


def test_a_filled_config_cannot_be_filled_again(tmp_path):
    with pytest.raises(xds.UsageError, match="pass its source"):
        trainer(tmp_path, xds_config=xds.Config.load(config_of(0)))
