"""Train an image classifier on digits, on a folder of images, or on dummy images.

xds examples/vision/train.py                                          # digits, one process for each device
xds examples/vision/train.py --resume runs/vision/checkpoints         # goes on after an interruption
xds examples/vision/train.py imagenet -a resnet50 --config examples/vision/imagenet.json
xds examples/vision/train.py imagenet -a resnet50 --evaluate --resume runs/vision/best
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Seeded, Splits, digits, dummy, folders
from model import SMALL, batch_norm_statistics, build_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import xds

HERE = Path(__file__).parent
COLUMNS = (
    *("epoch", "step", "loss", "acc1", "acc5", "validation_loss", "validation_acc1"),
    *("validation_acc5", "learning_rate", "images_per_second"),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder with train/ and val/; default: digits",
    )
    parser.add_argument(
        "--dummy", action="store_true", help="constant images, as many as ImageNet has"
    )
    parser.add_argument(
        "-a",
        "--arch",
        default="small",
        help=f"{', '.join(SMALL)}, or a name of torchvision or timm",
    )
    parser.add_argument("--pretrained", action="store_true", help="start from pretrained weights")
    parser.add_argument("--config", type=Path, default=HERE / "zero1.json")
    parser.add_argument(
        "--epochs", type=int, help="default: total_num_steps of the config's schedule"
    )
    parser.add_argument("--steps", type=int, help="stop after this number of updates in all")
    parser.add_argument(
        "-j", "--workers", type=int, default=0, metavar="N", help="processes of each rank that read"
    )
    parser.add_argument(
        "--image-size", type=int, metavar="N", help="default: 224; digits: 32, or 8"
    )
    parser.add_argument(
        "--channels-last", action="store_true", help="memory format of weights and images"
    )
    parser.add_argument("-p", "--print-freq", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/vision"), help="folder of the results"
    )
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="STEPS", help="also after each epoch"
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="its newest checkpoint")
    parser.add_argument("-e", "--evaluate", action="store_true", help="validate once, and end")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    splits = load(args)
    model = build_model(
        args.arch, splits.num_channels, splits.num_classes, is_pretrained=args.pretrained
    )
    if args.channels_last:
        model.to(memory_format=torch.channels_last)  # before initialize: flat buffers keep it
    training = Seeded(splits.training, args.seed)
    engine = xds.initialize(model, settings(args, len(training)), training_data=training)
    run = Run(engine, args)
    if args.resume is not None:
        run.resume(args.resume)
    if args.evaluate:
        run.say(run.validate(splits.validation))
    else:
        run.train(training, splits.validation)
    engine.destroy()


def load(args: argparse.Namespace) -> Splits:
    if args.dummy:
        return dummy(args.image_size or 224)
    if args.data is not None:
        return folders(args.data, args.image_size or 224)
    is_small = args.arch in SMALL
    return digits(8 if is_small else args.image_size or 32, channels=1 if is_small else 3)


def settings(args: argparse.Namespace, num_images: int) -> dict[str, Any]:
    """The config file, with what the command line says of the data and the length of the run."""
    config = json.loads(args.config.read_text())
    config |= {"dataloader_num_workers": args.workers, "dataloader_drop_last": True}
    if not args.evaluate:
        config["report_folder"] = str(args.out)  # `xds report` makes a page of the record there
    if args.epochs is not None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        batch_size = xds.Config.load(config, world_size=world_size).train_batch_size
        config["scheduler"]["params"]["total_num_steps"] = args.epochs * (num_images // batch_size)
    return config


class Sums:
    """Sums over images: the loss, answers that are right, those right among the first five, and their number.

    They stay on the device until a line is printed: the host would wait if it read a number in each step.
    """

    def __init__(self, engine: xds.Engine, start: list[float] | None = None) -> None:
        self.total = torch.zeros(4, dtype=torch.float64, device=engine.device)
        if start is not None and engine.dp_rank == 0:
            self.total += torch.tensor(start, dtype=torch.float64, device=engine.device)

    def add(self, rows: Tensor) -> None:
        """rows: [images, 3], as `scores` returns them."""
        self.total[:3] += rows.sum(0)
        self.total[3] += len(rows)

    def over_ranks(self) -> list[float]:
        """A collective."""
        total = self.total.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.tolist()


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """[images, 3]: the loss of each image, and 1 where its label is the first, or among the first five."""
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return torch.stack([losses, best[:, 0].to(losses), best.any(1).to(losses)], dim=1)


class Run:
    """One run: an engine, what was best, and the files in `args.out`."""

    def __init__(self, engine: xds.Engine, args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        self.dtype = next(
            engine.module.parameters()
        ).dtype  # bf16 or fp16, where the config says so
        self.format = torch.channels_last if args.channels_last else torch.contiguous_format
        self.best_acc1 = 0.0
        self.sums = Sums(engine)  # of the epoch

    # -- one batch ------------------------------------------------------------------------------------------

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        device = self.engine.device
        images = images.to(device, self.dtype, non_blocking=True, memory_format=self.format)
        output = self.engine(images)
        # torchvision's Inception and GoogLeNet also return auxiliary logits, which have no loss here
        logits = output[0] if isinstance(output, tuple) else output
        return logits, labels.to(device, non_blocking=True)

    def update(self, batches: Iterator[Any]) -> float:
        """One update. Returns the seconds that it has waited for data."""
        waited = 0.0
        for _ in range(self.engine.gradient_accumulation_steps()):
            start = time.perf_counter()
            images, labels = next(batches)
            waited += time.perf_counter() - start
            logits, labels = self.forward(images, labels)
            self.engine.backward(F.cross_entropy(logits.float(), labels))
            self.engine.step()
            self.sums.add(scores(logits.detach(), labels))
        return waited

    # -- epochs ---------------------------------------------------------------------------------------------

    def train(self, training: Seeded, validation: Dataset[Any]) -> None:
        """Train up to the last update of the schedule, from where a checkpoint has ended."""
        engine, args = self.engine, self.args
        schedule = engine.config.scheduler
        last = args.steps or (schedule.params["total_num_steps"] if schedule else 0)
        length = len(engine.training_dataloader) // engine.gradient_accumulation_steps()
        table = (
            Table(args.out / "epochs.csv", engine.global_steps // length) if self.is_first else None
        )
        while engine.global_steps < last:
            epoch = engine.global_steps // length
            training.epoch = epoch
            end = min((epoch + 1) * length, last)
            rate = self.train_epoch(epoch, end, length)
            if end == args.steps and end % length:
                self.save("checkpoints")  # it can go on in the middle of the epoch
                return
            totals = self.sums.over_ranks()
            self.sums = Sums(engine)
            row = {"epoch": epoch, "step": end, **means(totals)}
            found = {f"validation_{key}": each for key, each in self.validate(validation).items()}
            engine.monitor.write_events([(*one, engine.global_samples) for one in found.items()])
            row |= found
            row |= {"learning_rate": engine.get_lr()[0], "images_per_second": rate}
            if table is not None:
                table.add(row)
            self.say(row)
            is_best = row["validation_acc1"] > self.best_acc1
            self.best_acc1 = max(self.best_acc1, row["validation_acc1"])
            self.save("checkpoints")
            if is_best:
                self.save("best")

    def train_epoch(self, epoch: int, end: int, length: int) -> float:
        """Train up to update `end`. Returns the images a second, over all ranks."""
        engine, args = self.engine, self.args
        engine.train()
        batches = iter(engine.training_dataloader)  # after a resume: the rest of the epoch
        first, start = engine.global_steps, time.perf_counter()
        shown, shown_steps, shown_sums, waited = start, first, self.sums.over_ranks(), 0.0
        while engine.global_steps < end:
            waited += self.update(batches)
            step = engine.global_steps
            if step % args.print_freq == 0:
                totals, now = self.sums.over_ranks(), time.perf_counter()
                ago = [new - old for new, old in zip(totals, shown_sums, strict=True)]
                steps = step - shown_steps
                self.show(
                    f"Epoch: [{epoch}][{step - epoch * length}/{length}]",
                    ago,
                    totals,
                    steps,
                    (now - shown, waited),
                )
                shown, shown_steps, shown_sums, waited = now, step, totals, 0.0
            if args.save_every and step % args.save_every == 0 and step < end:
                self.save("checkpoints")
        self.sums.over_ranks()  # the device has done all of it
        seconds = time.perf_counter() - start
        if end % length == 0:
            for _ in batches:  # fewer than an update needs: the next pass is the next epoch
                pass
        return (end - first) * engine.train_batch_size() / seconds

    @torch.no_grad()
    def validate(self, dataset: Dataset[Any]) -> dict[str, float]:
        """Means over the images of `dataset`, each of which counts once. A collective."""
        engine = self.engine
        average_batch_norm(engine)
        sampler = DistributedSampler(dataset, engine.dp_world_size, engine.dp_rank, shuffle=False)
        size = engine.train_micro_batch_size_per_gpu()
        loader = DataLoader(dataset, size, sampler=sampler, num_workers=self.args.workers)
        engine.eval()
        rows = torch.cat([scores(*self.forward(*batch)) for batch in loader])
        engine.train()
        rows = engine.gather_for_metrics(rows, len(dataset)).double()
        return means([*rows.sum(0).tolist(), len(rows)])

    # -- files and lines ------------------------------------------------------------------------------------

    def resume(self, folder: Path) -> None:
        """Go on from the newest checkpoint: weights, optimizer, schedule, position in the data."""
        tag = xds.newest_checkpoint(folder)
        if tag is None:
            self.print(f"no checkpoint in {folder}: training starts from the beginning")
            return
        path, state = self.engine.load_checkpoint(folder, tag)
        self.best_acc1 = state["best_acc1"]
        self.sums = Sums(self.engine, state["sums"])
        self.print(f"resuming from {path}, after update {self.engine.global_steps}")

    def save(self, name: str) -> None:
        state = {"best_acc1": self.best_acc1, "sums": self.sums.over_ranks()}
        self.engine.save_checkpoint(self.args.out / name, client_state=state)

    @property
    def is_first(self) -> bool:
        return self.engine.global_rank == 0

    def print(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def say(self, row: dict[str, float]) -> None:
        """The result of a validation."""
        prefix = "validation_" if "validation_acc1" in row else ""
        acc1, acc5, loss = (row[prefix + name] for name in ("acc1", "acc5", "loss"))
        rate = f"  {row['images_per_second']:,.0f} images/s" if prefix else ""
        best = max(acc1, self.best_acc1)
        self.print(
            f" * Acc@1 {acc1:.3f} Acc@5 {acc5:.3f}  loss {loss:.4f}  best Acc@1 {best:.3f}{rate}"
        )

    def show(
        self,
        where: str,
        ago: list[float],
        totals: list[float],
        steps: int,
        seconds: tuple[float, float],
    ) -> None:
        """A line of progress: the values since the last line, and in brackets the means of the epoch."""
        new, mean = means(ago), means(totals)
        taken, waited = seconds
        self.print(
            f"{where}  Time {taken / steps:6.3f}  Data {waited / steps:6.3f}  "
            f"Loss {new['loss']:.4f} ({mean['loss']:.4f})  Acc@1 {new['acc1']:6.2f} ({mean['acc1']:6.2f})  "
            f"Acc@5 {new['acc5']:6.2f} ({mean['acc5']:6.2f})  images/s {ago[3] / taken:,.0f}"
        )


def means(totals: list[float]) -> dict[str, float]:
    """The mean loss, and the right answers in percent, of sums as `Sums` has them."""
    loss, acc1, acc5, count = totals
    return {"loss": loss / count, "acc1": 100 * acc1 / count, "acc5": 100 * acc5 / count}


def average_batch_norm(engine: xds.Engine) -> None:
    """Running means and variances become those of all ranks, so that every rank validates the same model."""
    found = batch_norm_statistics(engine.module)
    if not found or dist.get_world_size() == 1:
        return
    flat = torch.cat([buffer.double() for buffer in found])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(found, flat.split([len(buffer) for buffer in found]), strict=True):
        buffer.copy_(mean)


class Table:
    """epochs.csv, a line for each epoch. Those of the first `num_epochs` are kept."""

    def __init__(self, path: Path, num_epochs: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_text().splitlines(keepends=True) if num_epochs and path.exists() else []
        self.file = path.open("w", newline="", buffering=1)
        self.file.writelines(kept[: num_epochs + 1])
        self.writer = csv.DictWriter(self.file, COLUMNS)
        if not kept:
            self.writer.writeheader()

    def add(self, row: dict[str, float]) -> None:
        self.writer.writerow(row)


if __name__ == "__main__":
    main()
