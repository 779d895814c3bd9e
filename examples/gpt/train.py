"""Train a byte-level GPT on the standard library's sources, with the settings of a config file.

xds examples/gpt/train.py --config examples/gpt/zero3.json     # one process for each device
xds examples/gpt/train.py --checkpoints runs/gpt/checkpoints   # run it again after a crash to resume
xds examples/gpt/train.py --config examples/gpt/packed.json    # paragraphs, packed into rows
python examples/gpt/train.py                                   # one process
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import ByteWindows, load_text
from model import GPT, Shape, generate, within_samples
from tqdm import tqdm

import xds

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    shape = Shape()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "zero3.json")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for the record")
    parser.add_argument(
        "--steps", type=int, help="default: total_num_steps of the config's schedule"
    )
    parser.add_argument("--validate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--validation-batches", type=int, default=8, help="micro-batches per rank")
    parser.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save there; default: no"
    )
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|TAG",
        help="the checkpoint to resume from; auto, the default: the newest complete one",
    )
    parser.add_argument(
        "--fallback", action="store_true", help="if it is damaged, resume from the previous one"
    )
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--width", type=int, default=shape.width)
    parser.add_argument("--heads", type=int, default=shape.heads)
    parser.add_argument("--context", type=int, default=shape.context, help="bytes per window")
    parser.add_argument("--tied-head", action="store_true", help="output layer = token embedding")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    config = json.loads(args.config.read_text())
    packing = config.get("data_packing")
    training, validation = load_text(args.data, args.context, packs=packing is not None)
    shape = Shape(args.layers, args.width, args.heads, args.context, tied_head=args.tied_head)

    config["report_folder"] = str(
        args.out
    )  # `xds report` makes a page of the record in that folder
    if packing is not None:
        packing["tokens"] = args.context
    engine = xds.initialize(GPT(shape), config, training_data=training)

    if args.steps is None:
        args.steps = engine.config.scheduler.params["total_num_steps"]
    resume(engine, args)
    train(engine, validation, args)
    print_sample(engine, args)
    engine.destroy()


def resume(engine: xds.Engine, args: argparse.Namespace) -> None:
    """Resume from a checkpoint: weights, optimizer, schedule, data position and random numbers."""
    if args.checkpoints is None or args.resume == "none":
        return
    tag = xds.newest_checkpoint(args.checkpoints) if args.resume == "auto" else args.resume
    if tag is None:
        return
    path, _ = engine.load_checkpoint(args.checkpoints, tag, fallback=args.fallback)
    if engine.global_rank == 0:
        print(f"resuming from {path}, after step {engine.global_steps}", flush=True)


def train(engine: xds.Engine, validation: ByteWindows, args: argparse.Namespace) -> None:
    """Train up to step `args.steps`."""
    is_first = engine.global_rank == 0
    steps_done = engine.global_steps  # by the run that this one resumes
    tokens_per_step = engine.train_batch_size() * args.context
    batches = forever(engine.training_dataloader)
    # the page then shows tokens per second
    engine.monitor.write_events([("tokens_per_sample", args.context, engine.global_samples)])
    bar = tqdm(
        range(steps_done + 1, args.steps + 1),
        initial=steps_done,
        total=args.steps,
        disable=None if is_first else True,  # None: shown on a terminal alone
        unit="step",
        mininterval=0.5,
        dynamic_ncols=True,
    )
    engine.train()
    for step in bar:
        start_seconds = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, num_targets = inputs_of(next(batches), engine.device)
            loss = engine(*inputs)
            engine.backward(loss, weight=num_targets)
            engine.step()
        loss = engine.mean_loss()
        speed = tokens_per_step / (time.perf_counter() - start_seconds)
        bar.set_postfix_str(
            f"loss {loss:.3f}, {speed:,.0f} tokens/s, lr {engine.get_lr()[0]:.1e}, "
            f"|g| {engine.get_global_grad_norm():.2f}, {memory_gib(engine.device):.2f} GiB",
            refresh=False,  # the bar refreshes itself twice a second
        )
        if step % args.validate_every == 0 or step == args.steps:
            found = validate(engine, validation, args.validation_batches)
            engine.monitor.write_events([("validation_loss", found, engine.global_samples)])
            if is_first:
                line = f"step {step:5d}: training loss {loss:.3f}, validation loss {found:.3f}"
                bar.write(f"{line}, {speed:,.0f} tokens/s")
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.checkpoints)


def inputs_of(batch, device: torch.device):
    """The model's arguments for a batch, and how many bytes it predicts; None: as many in each batch."""
    if isinstance(batch, dict):  # packed rows
        tokens, targets, positions = (
            batch[name].to(device) for name in ("tokens", "targets", "position_ids")
        )
        return (tokens, targets, positions, within_samples(positions)), (targets != -100).sum()
    return tuple(part.to(device) for part in batch), None


def forever(loader):
    """Endless batches: the loader shuffles again each time it is started."""
    while True:
        yield from loader


@torch.no_grad()
def validate(engine: xds.Engine, windows: ByteWindows, num_batches: int) -> float:
    """Mean loss on fixed windows, spread over the text and divided among the ranks."""
    size = engine.train_micro_batch_size_per_gpu()
    num_windows = num_batches * size * engine.world_size
    spread = torch.linspace(0, len(windows) - 1, num_windows).long()
    mine = spread[engine.global_rank :: engine.world_size].split(size)
    engine.eval()
    loss_sum = 0.0
    for indices in mine:
        tokens, targets = zip(*(windows[int(i)] for i in indices), strict=True)
        batch = torch.stack(tokens).to(engine.device), torch.stack(targets).to(engine.device)
        loss_sum += engine(*batch).item()
    engine.train()
    return mean_over_ranks(loss_sum / num_batches, engine)


def mean_over_ranks(value: float, engine: xds.Engine) -> float:
    if engine.world_size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=engine.device)
    dist.all_reduce(total)
    return total.item() / engine.world_size


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: of the GPU's tensors, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_sample(engine: xds.Engine, args: argparse.Namespace) -> None:
    """Generate text from the prompt on all ranks; rank 0 prints it."""
    if args.sample == 0:
        return
    engine.eval()
    prompt = torch.tensor([list(args.prompt.encode())], device=engine.device)
    text = generate(engine, prompt, args.sample, args.context, args.seed)
    if engine.global_rank == 0:
        print("-" * 80, bytes(text[0].tolist()).decode(errors="replace"), "-" * 80, sep="\n")


if __name__ == "__main__":
    main()
