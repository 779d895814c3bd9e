"""The loss of each precision of masters and states after 1,000 steps, beside fp32 masters.

    python benchmarks/precision/losses.py [--steps 1000] [--seeds 3] [--models mlp gpt] [--variants ...]

Two small models of characters, an MLP and a GPT, read the project's own Markdown, each seed in another order.
The loss is the mean of the last tenth of the steps. All variants of a seed start alike and see equal batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import xds

ROOT = Path(__file__).parents[2]
LENGTH, SAMPLES, RATE = 64, 16, 3e-4
MASTERS: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES: dict[str, Any] = {**MASTERS, "bf16_optimizer_states": True}
PLAIN: dict[str, Any] = {"enabled": True}
NEAREST = {"master_rounding": "nearest"}
# the section bf16, and the dtype of states
VARIANTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "fp32 masters": (PLAIN, None),
    "bf16 states": (PLAIN, "bf16"),
    "int8 states": (PLAIN, "int8"),
    "bf16 masters": (MASTERS, None),
    "bf16 masters and states": (STATES, None),
    "bf16 masters, int8 states": (MASTERS, "int8"),
    "bf16 masters, to nearest": (MASTERS | NEAREST, None),
    "bf16 masters and states, to nearest": (STATES | NEAREST, None),
}


class Mlp(nn.Module):
    """The next character from the eight before it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.layers = nn.Sequential(
            nn.Linear(8 * 32, 384),
            nn.GELU(),
            nn.Linear(384, 256),
            nn.GELU(),
            nn.Linear(256, vocabulary),
        )

    def forward(self, text: Tensor) -> Tensor:
        windows = self.embed(text.unfold(1, 8, 1)[:, :-1]).flatten(2)
        return F.cross_entropy(self.layers(windows).float().flatten(0, 1), text[:, 8:].flatten())


class Gpt(nn.Module):
    """Two blocks of causal attention."""

    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        given = text[:, :-1]
        x = self.embed(given) + self.place(torch.arange(given.shape[1]))
        mask = torch.full((given.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), text[:, 1:].flatten())


MODELS = {"mlp": Mlp, "gpt": Gpt}


@cache  # pages that change during a run would make variants differ
def characters() -> tuple[Tensor, int]:
    """The project's pages as numbers of characters, and how many there are."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    known = sorted(set(text))
    place = {character: number for number, character in enumerate(known)}
    return torch.tensor([place[character] for character in text]), len(known)


def loss_of(model: str, variant: str, seed: int, steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    (half, states), (text, vocabulary) = VARIANTS[variant], characters()
    torch.manual_seed(seed)
    module = MODELS[model](vocabulary)
    schedule = {"warmup_num_steps": steps // 20, "total_num_steps": steps}
    params = {"lr": RATE, "betas": [0.9, 0.999], "state_dtype": states}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "bf16": half,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "steps_per_print": 10 * steps,
    }
    engine = xds.initialize(module, config)
    batches, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (SAMPLES,), generator=batches)
        loss = engine(torch.stack([text[start : start + LENGTH] for start in starts.tolist()]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return statistics.mean(losses[-max(steps // 10, 1) :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for model in asked.models:
        base: list[float] = []
        for name in asked.variants:
            found = [loss_of(model, name, seed, asked.steps) for seed in range(asked.seeds)]
            base = base or found
            more = statistics.mean(found) - statistics.mean(base)
            rounded = [round(loss, 4) for loss in found]
            row = {"model": model, "variant": name, "losses": rounded, "more": round(more, 4)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
