"""Train a randomly initialised Hugging Face causal language model; nothing is downloaded.

    xds examples/huggingface/train.py --config examples/huggingface/zero3.json

The model is any architecture of transformers, described in code; the text is that of examples/gpt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import xds

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "gpt"))
from data import load_text  # noqa: E402 (the other example's folder is known only now)

ARCHITECTURES = {
    # no token that ends a text: here a token is a byte
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt2": {
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "zero3.json")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--sample", type=int, default=100, help="bytes to generate at the end")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def build_model(architecture: str, context: int) -> torch.nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SystemExit(
            "examples/huggingface needs the package transformers, which is not installed; run "
            'pip install -e ".[huggingface]" in the xds checkout.'
        ) from None
    config = AutoConfig.for_model(
        architecture,
        vocab_size=256,
        max_position_embeddings=context,
        use_cache=False,
        **ARCHITECTURES[architecture],
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    model = build_model(args.architecture, args.context)
    training, _ = load_text(args.data, args.context)

    engine = xds.initialize(model, args.config, training_data=training)
    train(engine, args)
    text = generate(engine, b"def ", args)
    if engine.global_rank == 0:
        print("-" * 80, text.decode(errors="replace"), "-" * 80, sep="\n")
    engine.destroy()


def train(engine: xds.Engine, args: argparse.Namespace) -> None:
    is_first = engine.global_rank == 0
    batches = forever(engine.training_dataloader)
    steps = range(1, args.steps + 1)
    is_hidden = None if is_first else True  # None: shown on a terminal alone
    bar = tqdm(steps, disable=is_hidden, unit="step", mininterval=0.5, dynamic_ncols=True)
    engine.train()
    for step in bar:
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = next(batches)[0].to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss  # the model shifts the labels
            engine.backward(loss)
            engine.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}, lr {engine.get_lr()[0]:.1e}", refresh=False)
        if is_first and (step % 20 == 0 or step == args.steps):
            bar.write(f"step {step:5d}: loss {loss.item():.3f}")


def forever(loader):
    """Endless batches: the loader shuffles again each time it is started."""
    while True:
        yield from loader


@torch.no_grad()
def generate(engine: xds.Engine, prompt: bytes, args: argparse.Namespace) -> bytes:
    """Sample bytes after `prompt`. All ranks must call this, because a sharded forward is collective."""
    engine.eval()
    generator = torch.Generator(engine.device).manual_seed(args.seed)
    tokens: Tensor = torch.tensor([list(prompt)], device=engine.device)
    for _ in range(args.sample):
        logits = engine(input_ids=tokens[:, -args.context :]).logits[0, -1].float()
        chances = (logits / 0.8).softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)[None]], 1)
    return bytes(tokens[0].tolist())


if __name__ == "__main__":
    main()
