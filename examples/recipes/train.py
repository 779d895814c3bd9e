"""Fine-tune a causal language model of transformers on a text; with LoRA where asked to.

    xds train.py 7b_eight_gpus.json --model DIR --data text.txt

DIR is the folder of a model: config.json, and weights as safetensors. Without weights the model starts from
random values. Tokens come from the folder's tokenizer; without one a byte is a token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import xds

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "gpt"))
from data import standard_library  # noqa: E402 (the other example's folder is known only now)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a JSON file of this folder")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--sequence-length", type=int, help="default: the model's longest")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA matrices alone")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="saves and resumes")
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--output", type=Path, metavar="DIR", help="weights for from_pretrained")
    return parser.parse_args()


def build_model(folder: Path, lora_rank: int | None) -> tuple[nn.Module, Path | None]:
    """The model, and the folder of the weights that it does not have yet."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    has_weights = any(folder.glob("*.safetensors"))
    if lora_rank is None:
        with torch.device("meta"):  # no memory yet: each rank reads its own part of the weights
            model = AutoModelForCausalLM.from_config(config)
        return model, folder if has_weights else None
    if has_weights:
        base = AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True)
    else:
        base = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
    return get_peft_model(base, lora), None


def lora_7b() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `xds plan`: the 7B model with LoRA of rank 16, and a micro-batch of one sample."""
    tokens = torch.zeros((1, 2048), dtype=torch.int64)
    model, _ = build_model(HERE / "models" / "7b", 16)
    return model, {"input_ids": tokens, "labels": tokens}


class Windows(Dataset[dict[str, Tensor]]):
    """A text divided into samples of `length` tokens. The model shifts the labels itself."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.samples = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.samples[index].long()
        return {"input_ids": tokens, "labels": tokens}


def load_tokens(path: Path | None, folder: Path) -> Tensor:
    text = path.read_bytes() if path else standard_library()
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return torch.tensor(tokenizer(text.decode())["input_ids"], dtype=torch.int32)


def main() -> None:
    args = parse_args()
    torch.manual_seed(1)
    model, weights = build_model(args.model, args.lora)
    length = args.sequence_length or model.config.max_position_embeddings
    training = Windows(load_tokens(args.data, args.model), length)

    engine = xds.initialize(model, args.config, training_data=training, weights=weights)

    is_first = engine.global_rank == 0
    if args.checkpoints is not None and xds.newest_checkpoint(args.checkpoints) is not None:
        engine.load_checkpoint(args.checkpoints)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()  # all micro-batches of one update
        step = engine.global_steps
        if is_first and (step % 10 == 0 or step <= 3):
            peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            peak = f", {peak_bytes / 1e9:.1f} GB at most" if peak_bytes else ""
            print(f"step {step:4d}: loss {loss.item():.3f}{peak}", flush=True)
        if args.checkpoints is not None and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.checkpoints)
    if args.output is not None:
        state = engine.full_state_dict()  # on rank 0
        if is_first:
            engine.module.save_pretrained(args.output, state_dict=state)
    engine.destroy()


if __name__ == "__main__":
    main()
