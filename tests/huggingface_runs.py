"""Test helper: tiny Hugging Face models, data, and Trainers that return what they logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from xds.engine.integrations.huggingface import Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 61
ZERO = {"unit_min_numel": 0, "stage3_param_persistence_threshold": 0}


class Tokens(Dataset):
    """Sentences of nine tokens, always the same."""

    def __init__(self, count: int, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCAB, (count, 9), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **ZERO}, **more}


def arguments(folder: str | Path, world_size: int, **more: Any) -> TrainingArguments:
    """Four samples a micro-batch over all ranks, two micro-batches a step, clipping at work."""
    base: dict[str, Any] = {
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**base, **more})


def trainer(folder: str | Path, world_size: int = 1, model: Any = None, **more: Any) -> Trainer:
    own = {key: more.pop(key) for key in ("callbacks", "optimizers", "model_init") if key in more}
    if model is None and "model_init" not in own:
        model = llama()
    return Trainer(
        model,
        arguments(folder, world_size, **more),
        train_dataset=Tokens(24),
        eval_dataset=Tokens(12, seed=5),
        **own,
    )


def logged(done: Any, *keys: str) -> list[tuple[float, ...]]:
    """These keys of every log line that has the first of them."""
    return [tuple(line[k] for k in keys) for line in done.state.log_history if keys[0] in line]


def curve(done: Any) -> list[float]:
    """Loss and gradient norm of each step."""
    return [value for line in logged(done, "loss", "grad_norm") for value in line]
