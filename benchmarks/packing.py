"""Tokens a second of samples of unequal lengths: padded, in batches by tokens, and packed into rows.

    python benchmarks/packing.py [--rounds N] [--quick]

The samples are the functions and classes of Python's standard library, in words, cut after 512 of them. Each
contestant trains the GPT of examples/gpt (5M parameters, one rank, one thread) through the engine's loader, in
micro-batches of at most 1,024 tokens, padding included. Only tokens of samples count. Times are those of the
processor, which other processes of a shared machine change little.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "gpt")]
from harness import Row, Watch, finish, run_ranks  # noqa: E402

TOKENS, ROWS, VOCABULARY = 512, 2, 4096
BUDGET = TOKENS * ROWS
MAX_PADDING, MAX_PACKING = 0.02, 0.02
PADDED = {"input_ids": 0, "labels": -100}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "padded to the row": {},
    "padded to the longest": {},
    "by tokens": {
        "data_efficiency": {
            "data_sampling": {
                "dynamic_batching": {
                    "enabled": True,
                    "max_tokens": BUDGET,
                    "sequence_picking_order": "seqlen",
                    "lr_scaling_method": "none",
                }
            }
        }
    },
    "packed": {"data_packing": {"tokens": TOKENS}},
}


class Functions:
    """Sample i has the words of a function or class, as numbers. With `lengths`."""

    def __init__(self, most_files: int | None = None) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in sorted(root.rglob("*.py")) if "-packages" not in str(path)]
        self._samples = []
        for path in paths[:most_files]:
            text = path.read_text(errors="replace")
            for part in re.split(r"\n(?=(?:class |def |    def ))", text):
                words = re.findall(r"\w+|[^\w\s]|\n *", part)[:TOKENS]
                if len(words) > 1:
                    self._samples.append([zlib.crc32(w.encode()) % VOCABULARY for w in words])
        self.lengths = [len(one) for one in self._samples]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> list[int]:
        return self._samples[at]


def to_row(samples: list[list[int]]) -> Any:
    """A batch padded to whole rows."""
    from torch.nn import functional as F

    from xds.engine.data.dynamic_batches import padded

    batch = padded(samples)
    return {
        name: F.pad(value, (0, TOKENS - value.shape[1]), value=PADDED.get(name, 0))
        for name, value in batch.items()
    }


def contestant(name: str, data: Functions) -> tuple[Any, Iterator[Any]]:
    """An engine, and its batches without end."""
    import torch
    from model import GPT, Shape

    import xds
    from xds.engine.data.dynamic_batches import padded

    torch.manual_seed(0)
    by_tokens = name == "by tokens"
    config = {
        # by tokens: one batch of them is a micro-batch
        "train_micro_batch_size_per_gpu": 1 if by_tokens else ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "log_level": "error",
        **CONTESTANTS[name],
    }
    model = GPT(Shape(layers=4, width=256, heads=4, context=TOKENS, vocabulary=VOCABULARY))
    collate = {"padded to the row": to_row, "padded to the longest": padded}.get(name)
    engine = xds.initialize(model, config, training_data=data, collate_fn=collate)

    def batches() -> Iterator[Any]:
        loader = engine.training_dataloader
        while by_tokens:  # the batches of the shortest samples come first: take any
            at = int(torch.randint(len(loader.dataset.inner), ()))
            yield loader.collate_fn([loader.dataset.inner[at]])
        while True:
            yield from loader

    return engine, batches()


def measure(rank: int, _: int, rounds: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """By contestant and turn: seconds, those in the loader, slots and tokens of samples."""
    import torch
    from model import within_samples

    data = Functions(40 if quick else None)
    made = {name: contestant(name, data) for name in CONTESTANTS}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in made}
    for turn in range(rounds + 1):
        for name, (engine, batches) in made.items():
            start = time.process_time()
            batch = next(batches)
            loaded = time.process_time()
            ids, labels = batch["input_ids"], batch["labels"]
            targets = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), -100)], 1)
            more = ()
            if name == "packed":
                positions = batch["position_ids"]
                more = (positions, within_samples(positions))
            engine.backward(engine(ids, targets, *more), weight=(targets != -100).sum())
            engine.step()
            end = time.process_time()
            real = int((ids != 0).sum()) if name == "packed" else int(batch["attention_mask"].sum())
            row = {"seconds": end - start, "loading": loaded - start}
            row |= {"slots": float(ids.numel()), "tokens": float(real)}
            for key, value in row.items() if turn else ():
                found[name].setdefault(key, []).append(value)
    for name in found:
        found[name]["samples"] = [float(len(data)), statistics.median(data.lengths)]
    return found


def packing_cost(data: Functions) -> tuple[float, float]:
    """The share of padding in an epoch of packed rows, and the processor's seconds to make a row."""
    from xds.engine.config.sections import DataPacking
    from xds.engine.data.packing import packed_loader

    loader = packed_loader(
        data,
        DataPacking(tokens=TOKENS),
        micro_batch_size=ROWS,
        rank=0,
        world_size=1,
        step_rows=ROWS,
    )
    rows, start = 0, time.process_time()
    for batch in loader:
        rows += len(batch["input_ids"])
    seconds = time.process_time() - start
    return 1 - sum(data.lengths) / (rows * TOKENS), seconds / rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="steps of each contestant")
    parser.add_argument("--quick", action="store_true", help="a few files; keeps nothing")
    arguments = parser.parse_args()
    with Watch() as watch:
        (found,) = run_ranks(measure, 1, arguments.rounds, arguments.quick)
    speeds = {name: sum(one["tokens"]) / sum(one["seconds"]) for name, one in found.items()}
    rows = []
    for name, one in found.items():
        padding = 1 - sum(one["tokens"]) / sum(one["slots"])
        row = Row(f"{name}: tokens/s", speeds[name], unit="", others_busy=watch.others)
        faster = speeds[name] / speeds["padded to the row"]
        row.note = f"{faster:.2f} times padded to the row; {padding:.1%} padding in these steps"
        rows.append(row)
    padding, row_seconds = packing_cost(Functions(40 if arguments.quick else None))
    number, median = found["packed"]["samples"]
    note = f"{number:.0f} samples, median {median:.0f} tokens"
    rows.append(Row("packed: padding of an epoch", padding, must=MAX_PADDING, unit="", note=note))
    share = row_seconds * ROWS / statistics.median(found["packed"]["seconds"])
    rows.append(Row("packing and reading over a step", share, must=MAX_PACKING, unit=""))
    return finish(__file__, rows, keeps=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
