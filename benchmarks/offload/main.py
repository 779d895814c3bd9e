"""The table of offload: bits, bytes, overlap and disk on any machine; ceilings, steps and sizes on a GPU.

python benchmarks/offload/main.py                     # all that needs no GPU
python benchmarks/offload/main.py --parts bits bytes  # without the timings
python benchmarks/offload/main.py --ceilings --disk FOLDER
python benchmarks/offload/main.py --steps
python benchmarks/offload/main.py --largest [--disk FOLDER --disk-gb 40]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import ceilings  # noqa: E402
import device  # noqa: E402
import largest  # noqa: E402
import steps  # noqa: E402
from child import ChildFailed  # noqa: E402
from harness import Row, Watch, exit_code, print_rows, save  # noqa: E402
from scale import FULL, TINY  # noqa: E402

PARTS = ("bits", "bytes", "overlap", "disk")
NO_GPU = "no GPU"


def cpu_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The parts that any machine can measure."""
    if "bits" in options.parts:
        import bits

        yield from bits.rows(quick=options.quick)
    if "bytes" in options.parts:
        import states

        yield from states.rows()
    if "overlap" in options.parts:
        with Watch() as watch:
            found = list(_overlap().rows(3 if options.quick else 9))
        for row in found:
            row.others_busy = watch.others
            yield row
    if "disk" in options.parts:
        yield from _disk_rows(options.disk or Path("."), quick=options.quick)


def _overlap() -> ModuleType:
    """overlap/main.py; its name is taken by this file."""
    spec = importlib.util.spec_from_file_location("overlap_main", HERE / "overlap" / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _disk_rows(folder: Path, *, quick: bool) -> Iterator[Row]:
    import disk

    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-") as inside:
        for setting in disk.SETTINGS:
            yield from disk.rows_of(Path(inside), 1 << 30, 2 if quick else 9, setting)


def gpu_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The selected measurements on a GPU, until the time is over."""
    scale = TINY if options.dry_run_on_cpu else FULL
    until = time.monotonic() + 60 * options.minutes
    if options.ceilings:
        shown = set()
        try:
            for sample in ceilings.measure(scale, options.disk, until=until):
                shown.add(sample["name"])
                yield ceilings.row_of(sample)
            reason = "no --disk FOLDER"
        except ChildFailed as error:
            reason = str(error)
        yield from (
            Row(name, void="not measured", note=reason)
            for name in ceilings.NAMES
            if name not in shown
        )
    if options.steps:
        yield from steps.measured(scale, until=until)
    if options.largest:
        yield from largest.measured(scale, options.disk, 1e9 * options.disk_gb, until=until)


def unmeasured_rows(options: argparse.Namespace, reason: str) -> Iterator[Row]:
    """The rows of the selected measurements, or of all, without figures."""
    every = not (options.ceilings or options.steps or options.largest)
    if every or options.ceilings:
        yield from (Row(name, void="not measured", note=reason) for name in ceilings.NAMES)
    if every or options.steps:
        yield from steps.not_measured(FULL, reason)
    if every or options.largest:
        yield from largest.not_measured(reason)


def measured_before() -> dict[str, Row]:
    """Rows of a GPU in older results: a run without one must not replace them."""
    found = {}
    for path in sorted((HERE / "results").glob("*.json")):
        kept = json.loads(path.read_text())
        for entry in kept["rows"] if kept.get("gpu") else ():
            del entry["verdict"]
            if entry["value"] is not None:
                found[entry["name"]] = Row(**entry)
    return found


def extra_of_gpu() -> dict[str, str | None]:
    """The name of the GPU, for the file of results."""
    return {"gpu": device.pick(dry=False).name if device.has_gpu() else None}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ceilings", action="store_true", help="the limits of this machine")
    parser.add_argument("--steps", action="store_true", help="times of steps against these limits")
    parser.add_argument("--largest", action="store_true", help="the largest GPT that trains")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="without a GPU")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to be measured")
    parser.add_argument("--disk-gb", type=float, default=40, help="of it, for --largest")
    parser.add_argument("--minutes", type=float, default=9.0, help="on a GPU, no more than these")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    parser.add_argument("--quick", action="store_true", help="a few cases; nothing is kept")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Print and keep the rows; 1 if one misses its target."""
    options = read_options()
    is_gpu_run = options.ceilings or options.steps or options.largest
    can_run = options.dry_run_on_cpu or device.has_gpu()
    if not is_gpu_run:
        reason = NO_GPU if not device.has_gpu() else "needs --ceilings, --steps or --largest"
        source: Iterator[Row] = _both(cpu_rows(options), unmeasured_rows(options, reason))
    else:
        source = gpu_rows(options) if can_run else unmeasured_rows(options, NO_GPU)
    keeps = not options.quick and not options.dry_run_on_cpu and (can_run or not is_gpu_run)
    found: dict[str, Row] = {}
    for row in source:
        found[row.name] = row
        if options.json:
            print(json.dumps(asdict(row) | {"verdict": row.verdict}), flush=True)
        elif row.value is not None:
            print("  ".join(row.cells()), flush=True)
        if keeps and row.value is not None:
            save(HERE, [row], extra_of_gpu())  # a run that is killed keeps its rows
    rows = list(found.values())
    if not options.json:
        print_rows(rows)
    if keeps:
        earlier = measured_before()
        kept = [earlier.get(row.name, row) if row.value is None else row for row in rows]
        print(f"kept in {save(HERE, kept, extra_of_gpu())}", file=sys.stderr)
    return exit_code(rows)


def _both(first: Iterator[Row], second: Iterator[Row]) -> Iterator[Row]:
    yield from first
    yield from second


if __name__ == "__main__":
    raise SystemExit(main())
