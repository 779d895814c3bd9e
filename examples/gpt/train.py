"""Train a byte-level GPT on the standard library's sources, with the settings of a config file.

xds examples/gpt/train.py --config examples/gpt/zero3.json     # one process for each device
xds examples/gpt/train.py --checkpoints runs/gpt/checkpoints   # run it again after a crash to resume
python examples/gpt/train.py                                   # one process
"""

from __future__ import annotations

import argparse
import csv
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import ByteWindows, load_text
from model import GPT, Shape, generate
from tqdm import tqdm

import xds

HERE = Path(__file__).parent
COLUMNS = ("step", "loss", "validation_loss", "learning_rate", "gradient_norm", "tokens_per_second")


def parse_args() -> argparse.Namespace:
    shape = Shape()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "zero3.json")
    parser.add_argument("--data", type=Path, help="a text file instead of the standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for the curve")
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
    training, validation = load_text(args.data, args.context)
    shape = Shape(args.layers, args.width, args.heads, args.context, tied_head=args.tied_head)

    engine = xds.initialize(GPT(shape), args.config, training_data=training)

    if args.steps is None:
        args.steps = engine.config.scheduler.params["total_num_steps"]
    resume(engine, args)
    curve = train(engine, validation, args)
    if engine.global_rank == 0:
        draw(curve, args.out)
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


def train(engine: xds.Engine, validation: ByteWindows, args: argparse.Namespace) -> list[dict]:
    """Train up to step `args.steps`; return one row for each step, with the names of COLUMNS."""
    is_first = engine.global_rank == 0
    steps_done = engine.global_steps  # by the run that this one resumes
    tokens_per_step = engine.train_batch_size() * args.context
    batches = forever(engine.training_dataloader)
    curve = CurveFile(args.out, steps_done) if is_first else None
    bar = tqdm(
        range(steps_done + 1, args.steps + 1),
        initial=steps_done,
        total=args.steps,
        disable=not is_first,
        unit="step",
        mininterval=0.5,
        dynamic_ncols=True,
    )
    engine.train()
    for step in bar:
        start_seconds = time.perf_counter()
        loss_sum = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = (part.to(engine.device) for part in next(batches))
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item()
        row = {
            "step": step,
            "loss": mean_over_ranks(loss_sum / engine.gradient_accumulation_steps(), engine),
            "validation_loss": "",
            "learning_rate": engine.get_lr()[0],
            "gradient_norm": float(engine.get_global_grad_norm()),
            "tokens_per_second": tokens_per_step / (time.perf_counter() - start_seconds),
        }
        if step % args.validate_every == 0 or step == args.steps:
            row["validation_loss"] = validate(engine, validation, args.validation_batches)
        if curve is not None:
            curve.add(row)
            show(bar, row, engine.device)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps):
            engine.save_checkpoint(args.checkpoints)
    return curve.rows if curve is not None else []


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


def show(bar: tqdm, row: dict, device: torch.device) -> None:
    """Update the progress bar, and print a line for each validation."""
    bar.set_postfix_str(
        f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s, "
        f"lr {row['learning_rate']:.1e}, |g| {row['gradient_norm']:.2f}, "
        f"{memory_gib(device):.2f} GiB",
        refresh=False,  # the bar refreshes itself twice a second
    )
    if row["validation_loss"] != "":
        bar.write(
            f"step {row['step']:5d}: training loss {row['loss']:.3f}, "
            f"validation loss {row['validation_loss']:.3f}"
        )


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: of the GPU's tensors, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class CurveFile:
    """The rows of a run, also written to loss.csv. Existing rows of the first `steps_done` steps are kept."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "loss.csv").open("a+", newline="", buffering=1)
        self.file.seek(0)
        kept = self.file.readlines()[: steps_done + 1] if steps_done else []
        self.file.truncate(len("".join(kept)))
        self.rows: list[dict] = [
            {name: float(value) if value else "" for name, value in row.items()}
            for row in csv.DictReader(kept)
        ]
        self.writer = csv.DictWriter(self.file, COLUMNS)
        if not kept:
            self.writer.writeheader()

    def add(self, row: dict) -> None:
        self.rows.append(row)
        self.writer.writerow(row)


def draw(curve: list[dict], folder: Path) -> None:
    """Write the curve to loss.png, if matplotlib is installed."""
    print(f"loss curve: {folder / 'loss.csv'}", flush=True)
    try:
        import matplotlib
    except ImportError:
        print('no loss.png: it needs matplotlib; pip install -e ".[plot]"', flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot([row["step"] for row in curve], [row["loss"] for row in curve], label="training")
    measured = [row for row in curve if row["validation_loss"] != ""]
    axes.plot(
        [row["step"] for row in measured],
        [row["validation_loss"] for row in measured],
        "o-",
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    print(f"            {folder / 'loss.png'}", flush=True)


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
