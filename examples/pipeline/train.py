"""Train the GPT of examples/gpt in pipeline stages. The model stays as it is; the config says how it is cut.

xds --nproc-per-node 4 examples/pipeline/train.py --config examples/pipeline/pipeline.json
xds --nproc-per-node 4 examples/pipeline/train.py --checkpoints runs/pipeline/checkpoints    # saves and resumes
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import xds

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "gpt"))

from data import ByteWindows, load_text  # noqa: E402 (the files of examples/gpt)
from model import GPT, Shape  # noqa: E402


def parse_args() -> argparse.Namespace:
    shape = Shape()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "pipeline.json")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), help="of the record")
    parser.add_argument(
        "--steps", type=int, help="default: total_num_steps of the config's schedule"
    )
    parser.add_argument("--validate-every", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save there and resume; default: no"
    )
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--width", type=int, default=shape.width)
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--context", type=int, default=shape.context, help="bytes per window")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    training, validation = load_text(args.data, args.context)
    model = GPT(Shape(args.layers, args.width, args.heads, args.context))

    # `xds report` makes a page of the record in that folder
    config = json.loads(args.config.read_text()) | {"report_folder": str(args.out)}
    engine = xds.initialize(model, config, training_data=training)

    if engine.global_rank == 0:
        print(f"{engine.num_stages} stages x {engine.dp_world_size} data ranks", flush=True)
    if args.steps is None:
        args.steps = engine.config.scheduler.params["total_num_steps"]
    if args.checkpoints is not None and xds.newest_checkpoint(args.checkpoints) is not None:
        path, _ = engine.load_checkpoint(args.checkpoints)
        if engine.global_rank == 0:
            print(f"resuming from {path}, after step {engine.global_steps}", flush=True)
    train(engine, validation, args)
    engine.destroy()


def train(engine: xds.Engine, validation: ByteWindows, args: argparse.Namespace) -> None:
    """Train up to step `args.steps`."""
    # the page then shows tokens per second
    engine.monitor.write_events([("tokens_per_sample", args.context, engine.global_samples)])
    for step in range(engine.global_steps + 1, args.steps + 1):
        start_seconds = time.perf_counter()
        engine.train_batch()  # all micro-batches of one update, in all stages
        if step % args.validate_every == 0 or step == args.steps:
            seconds = time.perf_counter() - start_seconds
            found = engine.eval_batch(spread(validation, engine)).item()
            engine.monitor.write_events([("validation_loss", found, engine.global_samples)])
            if engine.global_rank == 0:
                losses = f"training loss {engine.mean_loss():.3f}, validation loss {found:.3f}"
                print(f"step {step:5d}: {losses}, {seconds:.2f} s", flush=True)
        if args.checkpoints is not None and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.checkpoints)


def spread(windows: ByteWindows, engine: xds.Engine) -> Iterator[Any]:
    """Micro-batches of windows spread over the text, other ones on each data rank."""
    size, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    chosen = torch.linspace(0, len(windows) - 1, count * size * engine.dp_world_size).long()
    for indices in chosen[engine.dp_rank :: engine.dp_world_size].split(size):
        tokens, targets = zip(*(windows[int(index)] for index in indices), strict=True)
        yield torch.stack(tokens), torch.stack(targets)


if __name__ == "__main__":
    main()
