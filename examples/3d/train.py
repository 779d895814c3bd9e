"""Train the GPT of examples/gpt on pipeline x data x tensor ranks. The model stays as it is.

xds --nproc-per-node 8 examples/3d/train.py
xds --nproc-per-node 8 examples/3d/train.py --checkpoints runs/3d    # saves and resumes, on any number of ranks
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import xds

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "gpt"))

from data import load_text  # noqa: E402 (the files of examples/gpt)
from model import GPT, Shape  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "3d.json")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="default: none")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(1)
    training, _ = load_text(args.data, args.context)
    model = GPT(Shape(args.layers, args.width, args.heads, args.context))

    engine = xds.initialize(model, args.config, training_data=training)

    config, is_first = engine.config, engine.global_rank == 0
    if is_first:
        tensor = config.tensor_parallel.size
        print(
            f"{engine.num_stages} stages x {engine.dp_world_size} data ranks x {tensor} tensor ranks",
            flush=True,
        )
    if args.checkpoints is not None and xds.newest_checkpoint(args.checkpoints) is not None:
        engine.load_checkpoint(args.checkpoints)
    while engine.global_steps < args.steps:
        start_seconds = time.perf_counter()
        loss = engine.train_batch()  # all micro-batches of one update
        step = engine.global_steps
        if is_first and (step % 10 == 0 or step == 1):
            seconds = time.perf_counter() - start_seconds
            print(f"step {step:4d}: loss {loss.item():.3f}, {seconds:.2f} s", flush=True)
        if args.checkpoints is not None and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.checkpoints)
    engine.destroy()


if __name__ == "__main__":
    main()
