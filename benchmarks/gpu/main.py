"""Measure xds on the first GPU: sections of at most ten minutes each, tables, and JSON.

    python benchmarks/gpu/main.py                     # all sections, each in a process of its own
    python benchmarks/gpu/main.py --train --memory    # some
    python benchmarks/gpu/main.py --tiny              # a first look: tiny sizes on the GPU, no results
    python benchmarks/gpu/main.py --dry-run           # tiny sizes on the CPU

A section that fails does not stop the others. What is not measured says so, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SECTIONS = ("tests", "ops", "train", "memory", "ranks", "checkpoints", "trace")
INSIDE = "XDS_BENCH_INSIDE"
TAIL = 20


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SECTIONS:
        parser.add_argument(f"--{name}", action="store_true", help="this section")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the GPU, no results")
    parser.add_argument("--minutes", type=float, help="of each section; default: 9, with --tiny 2")
    parser.add_argument("--models", nargs="+", metavar="SIZE", help="of 125M 350M 1.3B 6.7B")
    parser.add_argument("--deepspeed", type=Path, help="a folder with an unpacked DeepSpeed")
    both = ["plain", "deepspeed"]
    parser.add_argument("--against", nargs="+", choices=both, default=both, help="peers of --train")
    parser.add_argument("--disk", type=Path, help="folder for checkpoints; default: temporary")
    parser.add_argument("--out", type=Path, help="folder of the results; default: results/")
    options = parser.parse_args()
    options.minutes = options.minutes or (2.0 if options.tiny else 9.0)
    for size in options.models or []:
        if size not in ("125M", "350M", "1.3B", "6.7B"):
            parser.error(f"--models {size}: use 125M, 350M, 1.3B or 6.7B")
    if options.deepspeed is not None:
        options.deepspeed = _unpacked(parser, options.deepspeed)
    return options


def _unpacked(parser: argparse.ArgumentParser, folder: Path) -> Path:
    """The folder to put on the search path; wheels in it are unpacked into a temporary one."""
    import tempfile
    import zipfile

    if (folder / "deepspeed" / "__init__.py").is_file():
        return folder.resolve()
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        parser.error(f"--deepspeed {folder}: has neither deepspeed/ nor a wheel")
    target = Path(tempfile.mkdtemp(prefix="deepspeed-"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(target)
    return target


def inside(name: str, options: argparse.Namespace) -> int:
    """Run one section in this process."""
    import importlib

    from session import Session

    session = Session(name, options)
    if "PYTHONPATH" in session.env:  # the folder with xds, if it is not installed
        sys.path.append(session.env["PYTHONPATH"].split(os.pathsep)[0])
    others = {"tests": "parts_of_others", "ops": "parts_of_others", "trace": "tracing"}
    module = importlib.import_module(others.get(name, name))
    function = getattr(module, f"run_{name}") if name in ("tests", "ops") else module.run
    try:
        function(session)
    finally:
        session.end()
    return 0


def outside(name: str, minutes: float) -> tuple[int, list[str]]:
    """Run one section in a process of its own; its code and last lines."""
    kept: deque[str] = deque(maxlen=TAIL)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "main.py"), *sys.argv[1:]],
        env=os.environ | {INSIDE: name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            kept.append(line.rstrip())
            print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=60 * minutes + 30)
    except subprocess.TimeoutExpired:
        code = -9
        kept.append("stopped: it took too long")
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what it left behind
    except ProcessLookupError:
        pass
    process.wait()
    reader.join(timeout=5)
    return code, list(kept)


def results(names: list[str], since: float) -> list[dict[str, Any]]:
    """What the sections of this run have written."""
    from session import scratch

    files = [scratch() / f"{name}.json" for name in names]
    fresh = [file for file in files if file.exists() and file.stat().st_mtime >= since - 1]
    return [json.loads(file.read_text()) for file in fresh]


def summary(found: list[dict[str, Any]]) -> None:
    """The lines for benchmarks/README.md, and the bars that are met and missed."""
    rows = [(section["section"], row) for section in found for row in section["rows"]]
    if not rows:
        print("\nNothing was measured.")
        return
    first = found[0]
    if void := first["no_results"]:
        ran = sum(row["value"] is not None for _, row in rows)
        print(f"\n# {void}, no results: {ran} rows ran")
        _without([(s, r) for s, r in rows if r["value"] is None])
        return
    facts = ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)
    print(f"\n# For benchmarks/README.md: {first['device']['name']}, {facts}, {first['date']}\n")
    print("| figure | target | measured |\n|---|---|---|")
    for _, row in rows:
        if row["value"] is not None and row["must"] is not None:
            missed = ", target missed" if row["verdict"] == "target missed" else ""
            void = f", {row['void']}" if row["void"] else ""
            cell = f"{row['value']:.3g}{row['unit']}{missed}{void}"
            print(f"| {row['name']} | {row['must']:.3g}{row['unit']} | {cell} |")
        elif row["must"] is not None:
            print(f"| {row['name']} | {row['must']:.3g}{row['unit']} | {row['verdict']} |")
    print("\n# Bars")
    for verdict in ("met (aim)", "met", "target missed"):
        named = [row["name"] for _, row in rows if row["verdict"] == verdict]
        print(f"{verdict}: {len(named)}")
        if verdict == "target missed":
            print("".join(f"  {name}\n" for name in named), end="")
    _without([(s, r) for s, r in rows if r["void"]])


def _without(without: list[tuple[str, dict[str, Any]]]) -> None:
    """Rows that have no figure or a void one, with the reasons."""
    print(f"not measured or void: {len(without)}")
    for section, row in without[:25]:
        print(f"  {section}: {row['name']}: {row['void']} {row['note']}".rstrip())
    if len(without) > 25:
        print(f"  and {len(without) - 25} more, in the JSON files")


def main() -> int:
    """Run the sections; 1 if one of them failed."""
    options = arguments()
    if name := os.environ.get(INSIDE):
        return inside(name, options)
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("No CUDA device: use --dry-run to rehearse this command.")
            return 1
    chosen = [name for name in SECTIONS if getattr(options, name)]
    chosen = chosen or [name for name in SECTIONS if name != "trace"]  # --train has it
    failed: dict[str, list[str]] = {}
    since = time.time()
    for name in chosen:
        print(f"\n## {name}", flush=True)
        start = time.monotonic()
        code, tail = outside(name, options.minutes)
        print(f"## {name}: {time.monotonic() - start:.0f} s, code {code}", flush=True)
        if code:
            failed[name] = tail
    summary(results(chosen, since))
    for name, tail in failed.items():
        print(f"\n# FAILED: {name}; its last lines:\n" + "\n".join(f"    {t}" for t in tail))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
