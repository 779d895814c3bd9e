"""Runs the best layouts of a search for some steps, and writes a machine file that has learned from them.

Each runs in processes of its own. What ended is in results.json: a search that was interrupted goes on there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

from ...engine.planning.machine import Link, Machine, Number, Table
from ...engine.planning.search import Row
from ...engine.planning.seconds import (
    ATTENTION,
    HOST,
    MATRIX_WORK,
    MESSAGES,
    OTHER_KERNELS,
    UPDATE,
)
from ...utils.quoting import printable
from ...utils.sizes import size_text
from ...utils.small_files import replace_small_file
from ..planning.text import table_text
from .experiments import METRICS, run_experiment

FILE, MACHINE = "results.json", "machine.json"
STEPS_BEFORE = 2  # the timed ones
LEARNED = (MATRIX_WORK, ATTENTION, OTHER_KERNELS, UPDATE, MESSAGES, HOST)
TRUST = 0.1  # weight of a factor of 1 against the runs
SOURCE = "measured by xds tune"


def has_ranks(machine: Machine, world_size: int) -> bool:
    """The ranks can run on this machine."""
    if machine.device != "cpu":
        from ...ops.device import num_devices

        return num_devices() >= world_size
    return world_size <= max(os.cpu_count() or 1, machine.devices_per_host)


def confirm(options: argparse.Namespace, rows: Sequence[Row], machine: Machine) -> Row | None:
    """Run `rows`, and print what was measured. Returns the fastest; None: none of them ran."""
    folder = Path(options.results)
    folder.mkdir(parents=True, exist_ok=True)
    results = _read(folder / FILE)
    measured: list[tuple[float, Row]] = []
    lines = []
    for number, row in enumerate(rows, 1):
        key = _key(options, row)
        if key not in results:
            results[key] = _run(options, row, folder / f"{number}_{key[:8]}")
            replace_small_file(folder / FILE, json.dumps(results, indent=1))
        found = results[key]
        seconds = found.get("latency", 0.0) / 1000
        if seconds:
            measured.append((seconds, row))
        lines.append((str(number), _cells(row, found, seconds)))
    head = ["layout", "predicted", "measured", "error", "planned bytes", "peak of a process", "how"]
    print("\nRuns, by the wall clock\n" + table_text(head, lines))
    if not measured:
        return None
    learned = learn(machine, measured)
    replace_small_file(folder / MACHINE, learned.model_dump_json(indent=1, exclude_none=True))
    print(f"\n{printable(str(folder / MACHINE))}: the machine file with factors of these runs")
    return min(measured, key=lambda pair: pair[0] / pair[1].plan.config.train_batch_size)[1]


def _run(options: argparse.Namespace, row: Row, folder: Path) -> dict[str, Any]:
    """What the results file keeps of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(row.source)
    config["autotuning"] = {
        "enabled": True,
        "start_profile_step": STEPS_BEFORE,
        "end_profile_step": STEPS_BEFORE + options.steps,
        "metric_path": str(folder / METRICS),
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config, indent=1))
    order = {
        "model": options.model,
        "sequence_length": options.sequence_length,
        "trusts_code": options.trust_remote_code,
        "config": str(path),
    }
    words = ["--launcher", "local", "--nproc-per-node", str(options.world_size)]
    words += ["--module", "xds.launcher.tuning.trial_ranks", json.dumps(order)]
    outcome = run_experiment(words, folder)
    return {"kind": outcome.kind, "reason": outcome.reason, **outcome.metrics}


def _cells(row: Row, found: dict[str, Any], seconds: float) -> list[str]:
    predicted = row.seconds.total
    return [
        row.name,
        f"{predicted:.4g} s",
        f"{seconds:.4g} s" if seconds else "-",
        f"{predicted / seconds - 1:+.1%}" if seconds else "-",
        size_text(row.device_bytes),
        size_text(found["peak_bytes"]) if "peak_bytes" in found else "-",
        printable(found["reason"]) or found["kind"],
    ]


def _key(options: argparse.Namespace, row: Row) -> str:
    what = [row.source, options.model, options.sequence_length, options.world_size, options.steps]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def learn(machine: Machine, measured: Sequence[tuple[float, Row]]) -> Machine:
    """The machine with a factor for each part of a step, so that the runs take what was measured.

    The factors have the least squares of relative errors, and of their distance from 1. So a part that no run
    depends on keeps its numbers.
    """
    import torch

    rows, wanted = [], []
    for seconds, row in measured:
        parts = [row.seconds.parts.get(part, 0.0) / seconds for part in LEARNED]
        rows.append(parts)
        wanted.append(1 - (row.seconds.total / seconds - sum(parts)))
    shift = torch.eye(len(LEARNED), dtype=torch.float64) * TRUST
    left = torch.cat([torch.tensor(rows, dtype=torch.float64), shift])
    ones = torch.full((len(LEARNED),), TRUST, dtype=torch.float64)
    right = torch.cat([torch.tensor(wanted, dtype=torch.float64), ones])
    found = torch.linalg.lstsq(left, right[:, None]).solution[:, 0].clamp(0.1, 10).tolist()
    slower = dict(zip(LEARNED, found, strict=True))
    error = median(abs(row.seconds.total / seconds - 1) for seconds, row in measured)

    def table(old: Table, factor: float) -> Table:
        points = tuple((*point[:-1], point[-1] / factor) for point in old.points)
        return Table(
            points=points, source=f"{old.source}; {SOURCE}: x {1 / factor:.3f}", error=error
        )

    def number(old: Number, factor: float) -> Number:
        text = f"{old.source}; {SOURCE}: x {factor:.3f}"
        return Number(value=old.value * factor, source=text, error=error)

    def link(old: Link) -> Link:
        update = {
            "latency": table(old.latency, 1 / slower[MESSAGES]),
            "rate": table(old.rate, slower[MESSAGES]),
        }
        return old.model_copy(update=update)

    return machine.model_copy(
        update={
            "matrix": {k: table(t, slower[MATRIX_WORK]) for k, t in machine.matrix.items()},
            "attention": {k: table(t, slower[ATTENTION]) for k, t in machine.attention.items()},
            "memory": table(machine.memory, slower[OTHER_KERNELS]),
            "kernels": {k: table(t, slower[OTHER_KERNELS]) for k, t in machine.kernels.items()},
            "launch": number(machine.launch, slower[HOST]),
            "update": number(machine.update, 1 / slower[UPDATE]),
            "links": {
                place: {name: link(each) for name, each in links.items()}
                for place, links in machine.links.items()
            },
        }
    )


__all__ = ["confirm", "has_ranks", "learn"]
