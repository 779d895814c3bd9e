"""Train a tiny policy by a reward on what it generates: REINFORCE with a baseline.

    xds examples/generation/train.py

Each step generates with the model that trains, rewards the text, and raises the log-probability of what was
better than the mean of its group. The reward is the share of even numbers; one who knows nothing gets 0.5.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import xds

VOCAB, PROMPT, LENGTH = 64, 4, 12


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))


def rewards_of(tokens: Tensor) -> Tensor:
    """[rows]: the share of generated tokens that are even."""
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(1)


def log_probabilities(engine: xds.Engine, tokens: Tensor) -> Tensor:
    """[rows]: of the generated tokens of each row, summed."""
    logits = engine(input_ids=tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    chosen = logits.log_softmax(-1).gather(2, tokens[:, PROMPT:, None])
    return chosen.squeeze(2).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--stage", type=int, default=3, help="the ZeRO stage")
    parser.add_argument("--group", type=int, default=16, help="texts of each prompt, on each rank")
    parser.add_argument("--save", default="", help="folder for the weights, for another program")
    args = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": args.group,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    engine = xds.initialize(build(), config)
    torch.manual_seed(1 + engine.dp_rank)  # each rank has texts of its own
    for step in range(args.steps + 1):
        prompt = torch.randint(1, VOCAB, (1, PROMPT), device=engine.device).repeat(args.group, 1)
        mask = torch.ones_like(prompt)
        tokens = engine.generate(prompt, attention_mask=mask, max_new_tokens=LENGTH, do_sample=True)
        rewards = rewards_of(tokens)
        advantages = rewards - rewards.mean()
        loss = -(advantages * log_probabilities(engine, tokens)).mean()
        engine.backward(loss)
        engine.step()
        mean = engine.gather_for_metrics(rewards, None).mean().item()
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step}: reward {mean:.3f}", flush=True)
    if args.save:
        engine.weights(dtype=torch.bfloat16).save(args.save)
        if engine.global_rank == 0:
            print(f"weights: {args.save}")


if __name__ == "__main__":
    main()
