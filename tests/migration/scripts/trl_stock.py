"""Stock TRL with DeepSpeed's arguments: GRPO, RLOO or online DPO of a tiny model with a reward function.

It imports nothing of xds. Its last line is JSON, for the test that starts it: rewards of each rank, and losses.

    xds --as-deepspeed trl_stock.py grpo 3
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import deepspeed
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
STEPS = 3


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))


REWARDS: list[float] = []


def low_numbers(completions: list[str], **_: Any) -> list[float]:
    """The share of words with a low number."""
    found = []
    for text in completions:
        numbers = [int(word[1:]) for word in text.split() if word.startswith("w")]
        found.append(sum(number < 10 for number in numbers) / max(len(numbers), 1))
    REWARDS.extend(found)
    return found


def ds_config(stage: int) -> dict[str, Any]:
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, **dict.fromkeys(batch, "auto")}


def main() -> None:
    kind, stage = sys.argv[1], int(sys.argv[2])
    transformers.utils.logging.set_verbosity_error()
    data = Dataset.from_dict({"prompt": [f"w{n} w{n + 1} w{n + 2}" for n in range(16)]})
    given: dict[str, Any] = {}
    more: dict[str, Any]
    if kind == "online_dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        trainer_of, config_of = OnlineDPOTrainer, OnlineDPOConfig
        more = {"max_new_tokens": 6, "per_device_train_batch_size": 2, "max_length": 32}
        given["ref_model"] = model()
    else:
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        trainer_of = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[kind]
        config_of = {"grpo": GRPOConfig, "rloo": RLOOConfig}[kind]
        more = {"max_completion_length": 6, "per_device_train_batch_size": 4, "num_generations": 4}
        more["beta"] = 0.0  # no second model
    common = {"learning_rate": 1e-2, "max_steps": STEPS, "report_to": [], "use_cpu": True}
    silent = {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3}
    with tempfile.TemporaryDirectory() as folder:
        args = config_of(folder, deepspeed=ds_config(stage), bf16=False, **common, **silent, **more)
        trainer = trainer_of(
            model=model(),
            reward_funcs=low_numbers,
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, REWARDS)
    if dist.get_rank() == 0:
        print(json.dumps({"rewards": everyone, "losses": losses, "by": deepspeed.__version__}))


main()
