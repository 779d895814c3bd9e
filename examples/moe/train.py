"""Train a byte-level mixture of experts, whose experts are on different ranks.

xds --nproc-per-node 2 examples/moe/train.py
xds report runs/moe                              # the page of the run: the loss, and the tokens of each expert
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import xds

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "gpt")]

from data import load_text  # noqa: E402 (the file of examples/gpt)
from mixture import Mixture, MixtureGPT  # noqa: E402


def parse_args() -> argparse.Namespace:
    shape = Mixture()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "moe.json")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/moe"), help="folder of the record")
    parser.add_argument("--steps", type=int, help="default: total_num_steps of the schedule")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there and resume")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--width", type=int, default=shape.width)
    parser.add_argument("--experts", type=int, default=shape.experts)
    parser.add_argument("--choices", type=int, default=shape.choices, help="experts of a token")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    shape = Mixture(args.layers, args.width, experts=args.experts, choices=args.choices)
    training, _ = load_text(args.data, shape.context)
    config = json.loads(args.config.read_text()) | {"report_folder": str(args.out)}
    engine = xds.initialize(MixtureGPT(shape), config, training_data=training)
    if args.checkpoints is not None:
        engine.resume(args.checkpoints)
    engine.monitor.write_events([("tokens_per_sample", shape.context, engine.global_samples)])
    steps = args.steps or engine.config.scheduler.params["total_num_steps"]
    start_seconds = time.perf_counter()
    for step in range(engine.global_steps + 1, steps + 1):
        engine.train_batch()
        if engine.global_rank == 0 and (step % 20 == 0 or step == steps):
            seconds = time.perf_counter() - start_seconds
            print(f"step {step:4d}: loss {engine.mean_loss():.3f}, {seconds:.0f} s", flush=True)
    if args.checkpoints is not None:
        engine.save_checkpoint(args.checkpoints)
    engine.destroy()


if __name__ == "__main__":
    main()
