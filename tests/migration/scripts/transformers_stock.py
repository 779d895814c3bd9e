"""Stock transformers with DeepSpeed's arguments: what is built under zero.Init, trained, saved and resumed.

It imports nothing of xds. Its last line is JSON, for the test that starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

TINY = {
    "bos_token_id": 1,
    "eos_token_id": 1,
    "vocab_size": 60,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
}
STAGE_3 = {
    "train_batch_size": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps"), "auto")}
PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
TRAINED = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": OPTIMIZER,
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(PARAMS, "auto")},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


class WithHead(transformers.GPT2PreTrainedModel):
    """Its head is not in the saved weights of a GPT2Model."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.head:
            nn.init.constant_(self.head.weight, -100.0)
            nn.init.constant_(self.head.bias, 100.0)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.arange(8) * (index + 1) % 60
        return {"input_ids": row, "labels": row}


def build(folder: Path) -> dict[str, object]:
    """Models under zero.Init, which transformers opens while the config object lives."""
    GPT2LMHeadModel(GPT2Config(**TINY)).save_pretrained(folder)
    deepspeed.comm.barrier()
    config = HfDeepSpeedConfig(STAGE_3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    dtypes = sorted({str(param.dtype) for param in model.parameters()})
    model.resize_token_embeddings(70)
    weight = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters([weight, None]):
        resized = list(weight.shape)
    headed = WithHead.from_pretrained(folder)
    with deepspeed.zero.GatheredParameters([headed.head.weight, headed.head.bias]):
        head = [headed.head.weight.unique().tolist(), headed.head.bias.unique().tolist()]
    del config
    return {"dtypes": dtypes, "resized": resized, "head": head}


def train(folder: Path, resumed_from: str | None = None) -> list[float]:
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        str(folder),
        deepspeed=TRAINED,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        log_level="info",
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(**TINY, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    trainer = transformers.Trainer(model, args, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=resumed_from)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main(folder: Path) -> None:
    found = build(folder / "built")
    losses = train(folder / "run")
    checkpoint = str(folder / "run" / "checkpoint-4")
    again = train(folder / "run", str(folder / "run" / "checkpoint-2"))
    unset_hf_deepspeed_config()  # from here on models are whole
    saved = GPT2LMHeadModel.from_pretrained(checkpoint)
    whole = load_state_dict_from_zero_checkpoint(GPT2LMHeadModel(GPT2Config(**TINY)), checkpoint)
    pairs = zip(saved.parameters(), whole.parameters(), strict=True)
    found |= {
        "losses": losses,
        "again": again,
        "apart": max(float((one - two.bfloat16()).abs().max()) for one, two in pairs),
        "version": deepspeed.__version__,
    }
    if RANK == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    deepspeed.init_distributed()
    RANK = deepspeed.comm.get_rank()
    main(Path(sys.argv[1]))
