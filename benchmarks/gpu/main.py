"""Measure xds on the first GPU: one call, one table of at most 60 lines, one JSON.

    python benchmarks/gpu/main.py --first                  # kernels, correctness, timings: eight minutes
    python benchmarks/gpu/main.py --first --carry wheels   # with packages that the machine lacks
    python benchmarks/gpu/main.py --more                   # 6.7B, the largest model, checkpoints, traces
    python benchmarks/gpu/main.py --first --dry-run        # tiny sizes on the CPU; no results

What is right and was measured at these sources on this device is not run again: call it again to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from runner import Part, Phase, last_lines, run  # noqa: E402
from table import table  # noqa: E402

# what decides a result; main.py, runner.py and table.py only run the parts
PLACES = "utils ops offload compression zero pipe tensor engine launcher deepspeed examples/gpt"
SOURCES = (
    *(
        "*.py",
        *PLACES.split(),
        "tests/ops",
        "tests/offload",
        "tests/rehearsal",
        "benchmarks/gpu/gpt.py",
    ),
    *(
        f"benchmarks/gpu/{name}.py"
        for name in ("common", "correct", "models", "ranks", "timing", "more")
    ),
)
INDUCTOR = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
FACTS = (
    "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'name': p.name, "
    "'memory_gib': round(p.total_memory / 2**30, 1), 'capability': f'{p.major}{p.minor}', "
    "'cuda': torch.version.cuda, 'gpus': torch.cuda.device_count()}))"
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--first", action="store_true", help="most valuable first")
    what.add_argument("--more", action="store_true", help="what does not fit into that call")
    parser.add_argument("--seconds", type=float, default=480, help="of the whole call; default 480")
    parser.add_argument("--carry", type=Path, help="folder of wheels that this machine lacks")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, again if they ran")
    parser.add_argument("--out", type=Path, help="folder of the JSON; default: results/")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the GPU")
    options = parser.parse_args()
    known = [part.name for phase in plan(options, 2) for part in phase.parts]
    for name in options.only or []:
        if name not in known:
            parser.error(f"--only {name}: must be one of: {', '.join(known)}")
    return options


def plan(options: argparse.Namespace, num_gpus: int) -> list[Phase]:
    """The parts, most valuable first: correctness side by side, then each timing alone."""
    small = options.dry_run or options.tiny
    needs, slack = (3.0, 3) if small else (20.0, 1)  # CPUs are slow, and shared

    def script(name: str, file: str, *words: str, seconds: float = 90, **env: str) -> Part:
        return Part(name, (sys.executable, str(HERE / file), *words), slack * seconds, needs, env)

    def alone(seconds: float, *names: str, file: str = "timing.py") -> list[Phase]:
        return [Phase((script(n, file, n, seconds=seconds),), slack * seconds) for n in names]

    if options.more:
        ranks = script("NCCL", "ranks.py", str(min(8, num_gpus)), "nccl", seconds=150)
        phases = alone(150, "checkpoint times", "traces", "6.7B", "largest", file="more.py")
        return [*phases, *([Phase((ranks,), 150)] if num_gpus > 1 else [])]
    groups = ("readme", "memory", "compile", "checkpoints", "optimizers", "features")
    models = ("generation", "inference", "changed")
    threads = {"OMP_NUM_THREADS": "1" if options.dry_run else "2"}
    correct = [
        *(script(name, "correct.py", name, **threads) for name in ("tests", "stages", "offload")),
        *(script(f"{n} ranks", "ranks.py", str(n), **threads) for n in (2, 4)),
        *(script(name, "correct.py", name, **threads) for name in groups),
        *(script(name, "models.py", name, **threads) for name in models),
    ]
    has_peer = bool(options.carry and list(options.carry.glob("deepspeed-*.whl")))
    peer = [script("deepspeed build", "timing.py", "deepspeed build")] if has_peer else []
    jobs = (os.cpu_count() or 2) if options.dry_run else 10
    return [
        Phase((script("kernels", "correct.py", "kernels", seconds=150),), slack * 150),
        Phase((*correct, *peer), options.seconds if small else 120, jobs),
        *alone(90, "eager", "1.3B offload"),
        *alone(60, "compiled, 8,192", "host update", "host time", "compiled, 2,048"),
        *(alone(60, "1.3B deepspeed") if has_peer else []),
        *alone(60, "generation times", "attention times", "dropping times", file="models.py"),
    ]


def environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Variables of every part. xds is this checkout, whatever its folder is called."""
    site = folder / "site"
    if options.carry:
        wheels = sorted(str(file) for file in options.carry.glob("*.whl"))
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        done = subprocess.run(
            [*command, "--no-compile", "--target", str(site), *wheels],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise SystemExit(f"--carry {options.carry}: {done.stderr.strip()[-1000:]}")
    (folder / "path").mkdir()
    (folder / "path" / "xds").symlink_to(ROOT)
    # HERE: with PYTHONSAFEPATH a script's folder is not searched
    places = [str(folder / "path"), str(HERE), str(site), os.environ.get("PYTHONPATH", "")]
    found = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, places)), "TMPDIR": str(folder)}
    found |= {"XDS_BENCH_DEVICE": "cpu" if options.dry_run else "cuda"}
    found |= {"XDS_BENCH_TINY": str(int(options.dry_run or options.tiny))}
    if options.dry_run:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    extensions = Path.home() / ".cache" / "xds-gpu-extensions"  # where DeepSpeed compiles
    for lock in extensions.rglob("lock"):  # of a build that was killed
        lock.unlink(missing_ok=True)
    return found | {"TORCH_EXTENSIONS_DIR": str(extensions), "MAX_JOBS": "8", **INDUCTOR}


def facts(options: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """The device. A process asks, for one whose driver hangs must not take this one with it."""
    if options.dry_run:
        return {"name": "CPU", "capability": "", "gpus": 1}
    try:
        command = [sys.executable, "-c", FACTS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        lines = "\n".join(last_lines(done.stderr.splitlines())[-3:])
    except subprocess.TimeoutExpired:
        lines = "torch did not answer within 90 s"
    raise SystemExit(f"no CUDA device, use --dry-run to rehearse this command:\n{lines}")


def line_of(*command: str) -> str:
    """The last line that a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def versions() -> dict[str, str]:
    """Driver, compiler, packages, and the commit of xds where git knows it."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    found["driver"] = line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["nvcc"] = line_of("nvcc", "--version")
    found["commit"] = line_of("git", "describe", "--always", "--dirty")
    return found


def source_hash() -> str:
    """Of what decides a result: files, and torch."""
    files: set[Path] = set()
    for pattern in SOURCES:
        for place in ROOT.glob(pattern):
            files |= set(place.rglob("*.*")) if place.is_dir() else {place}
    total = hashlib.sha256(importlib.metadata.version("torch").encode())
    for file in sorted(files):
        if file.suffix in (".py", ".cpp", ".cu", ".cuh", ".h", ".json"):
            total.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:10]


class Results:
    """The JSON of a device and of sources: what has run, now and before."""

    def __init__(self, options: argparse.Namespace, device: dict[str, Any]) -> None:
        void = "dry run" if options.dry_run else "tiny sizes" if options.tiny else ""
        folder = options.out or (HERE / "results" if not void else Path(tempfile.mkdtemp()))
        slug = re.sub(r"[^a-z0-9]+", "-", f"{void} {device['name']}".lower()).strip("-")
        self.file = folder.resolve() / f"{slug}-{source_hash()}.json"
        self.content: dict[str, Any] = {
            "date": datetime.datetime.now().isoformat("T", "seconds"),
            "void": void,
            "device": device,
            "versions": versions(),
            "parts": {},
        }
        for file in (HERE / "results" / self.file.name, self.file):
            if file.exists():
                self.content["parts"] |= json.loads(file.read_text())["parts"]

    def is_right(self, name: str, env: dict[str, str]) -> bool:
        """Whether a part need not run."""
        known = self.content["parts"].get(name, {})
        native = env.get("XDS_BENCH_NATIVE", "1")
        return known.get("state") == "right" and known.get("native") == native

    def keep(self, name: str, part: dict[str, Any], env: dict[str, str]) -> None:
        """Write it at once: what comes after may end this process."""
        part["date"] = datetime.datetime.now().isoformat("T", "seconds")
        part["native"] = env.get("XDS_BENCH_NATIVE", "1")
        self.content["parts"][name] = part
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.rename(self.file)


def measure(phases: list[Phase], results: Results, env: dict[str, str], end: float) -> None:
    """Run what is missing or was wrong. Without kernels that load, the rest runs with torch's operations."""
    folder = Path(env["TMPDIR"])
    for phase in phases:
        missing = tuple(p for p in phase.parts if not results.is_right(p.name, env))
        found = run(Phase(missing, phase.seconds, phase.jobs), env, folder, end)
        with contextlib.closing(found):
            for name, part in found:
                results.keep(name, part, env)
                text = f"{name}: {part['state']}, {part.get('seconds', 0):.0f} s {part['reason']}"
                print(text[:150], file=sys.stderr, flush=True)
        kernels = results.content["parts"].get("kernels")
        right = (
            {each.get("case") for each in kernels["records"] if each.get("ok")} if kernels else ()
        )
        if kernels and f"Adam on {env['XDS_BENCH_DEVICE']}, bf16" not in right:
            env["XDS_BENCH_NATIVE"] = "0"


def main() -> int:
    """Measure, and print the table; 1 if a part is wrong or did not run."""
    start = time.monotonic()
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with tempfile.TemporaryDirectory(prefix="xds-gpu-", ignore_cleanup_errors=True) as folder:
        env = environment(options, Path(folder))
        device = facts(options, env)
        if device["capability"]:
            env.setdefault("XDS_CUDA_ARCHS", device["capability"])
        results, phases = Results(options, device), plan(options, device["gpus"])
        env["XDS_BENCH_OUT"] = str(results.file.parent)
        if options.only:
            phases = [
                Phase(tuple(p for p in ph.parts if p.name in options.only), ph.seconds, ph.jobs)
                for ph in phases
            ]
            for name in options.only:
                results.content["parts"].pop(name, None)
        stopped = ""
        try:
            measure(phases, results, env, start + options.seconds - 5)
        except KeyboardInterrupt:
            stopped = ", stopped"
    return show(options, results, phases, f"{time.monotonic() - start:.0f} s{stopped}")


def show(options: argparse.Namespace, results: Results, phases: list[Phase], took: str) -> int:
    """Print the table of this call's parts."""
    known, parts = results.content["parts"], [part.name for phase in phases for part in phase.parts]
    missing = {"state": "not run", "reason": "the call was stopped", "records": []}
    chosen = {name: known.get(name, missing) for name in parts}
    content = results.content
    facts_text = ", ".join(f"{k} {v}" for k, v in content["versions"].items() if v)
    header = [
        f"# {content['device']['name']}, {content['date']}, {took}"
        + ", NO RESULTS" * bool(content["void"]),
        f"# {facts_text}",
        f"# {results.file}",
    ]
    if any(part.get("native") == "0" for part in chosen.values()):
        header.append("# The kernels of xds did not load: later parts ran with torch's operations.")
    print("\n".join(table(header, chosen)), flush=True)
    return int(any(part["state"] != "right" for part in chosen.values()))


if __name__ == "__main__":
    raise SystemExit(main())
