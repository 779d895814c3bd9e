"""What every section has: its deadline, the processes that it starts, its rows and their file."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scale import ROOT

from harness import Row, print_rows  # isort: skip

HERE = Path(__file__).resolve().parent
NOT_MEASURED = "not measured"
LOG_LINES = 25  # of a process that failed


def scratch() -> Path:
    """A folder of this user for what is not a result."""
    folder = Path(tempfile.gettempdir()) / f"xds-gpu-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


class Failed(Exception):
    """A process raised, ended, or took too long; the message is one line."""


def environment(*, dry: bool) -> dict[str, str]:
    """Variables of every process. xds is importable also where it is not installed."""
    found = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if importlib.util.find_spec("xds") is None:
        folder = scratch() / "path"
        folder.mkdir(exist_ok=True)
        link = folder / "xds"
        if not link.is_symlink() or link.resolve() != ROOT:
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found.get("PYTHONPATH")]))
    found["PYTHONUNBUFFERED"] = "1"
    found["TORCH_EXTENSIONS_DIR"] = str(unlocked_extensions())
    if dry:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDS_BENCH_DRY": "1"}
        found |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    return found


def unlocked_extensions() -> Path:
    """The folder where DeepSpeed compiles. A build that was killed leaves a lock that stops the next one."""
    folder = scratch() / "extensions"
    for lock in folder.rglob("lock"):
        lock.unlink(missing_ok=True)
    return folder


def line_of(*command: str) -> str:
    """The last line that a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def versions() -> dict[str, str]:
    """Driver, compiler, packages and the commit of xds."""
    found = {"python": platform.python_version(), "xds": line_of("git", "describe", "--always")}
    found["driver"] = line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["nvcc"] = line_of("nvcc", "--version")
    from importlib.metadata import PackageNotFoundError, version

    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


class Child:
    """A worker process; `ask` sends a command and waits for its answer."""

    def __init__(self, env: dict[str, str], **always: Any) -> None:
        """always: arguments of every command."""
        self._always = always
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self._text = b""

    def ask(self, what: str, until: float, **spec: Any) -> dict[str, Any]:
        """The answer to a command. Raises `Failed`; after that the process is gone."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(
                json.dumps({"do": what, **self._always, **spec}).encode() + b"\n"
            )
            self._process.stdin.flush()
            answer = self._answer(until)
        except (BrokenPipeError, EOFError):
            self.end()
            raise Failed(f"the process ended: {self._tell(what)}") from None
        except Failed:
            if self.is_alive:  # its stack goes to the log
                os.kill(self._process.pid, signal.SIGUSR1)
                time.sleep(0.5)
            self.end()
            self._tell(what)
            raise
        if "error" in answer:
            self.end()
            self._tell(what)
            raise Failed(answer["error"])
        return answer

    def _answer(self, until: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if b"\n" in self._text:
                    line, _, self._text = self._text.partition(b"\n")
                    found: dict[str, Any] = json.loads(line)
                    return found
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise Failed("time")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                self._text += chunk

    def _tell(self, what: str) -> str:
        """Print the end of what the process wrote to stderr; its last line."""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        print(
            "".join(f"    {what} | {line[:300]}\n" for line in lines[-LOG_LINES:]),
            end="",
            flush=True,
        )
        return lines[-1][:200] if lines else f"code {self._process.poll()}"

    @property
    def is_alive(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process and what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class Session:
    """One section's run."""

    def __init__(self, section: str, options: Any) -> None:
        self.section, self.options, self.dry = section, options, options.dry_run
        self.small = options.dry_run or options.tiny  # tiny sizes, which give no results
        self._void = "dry run" if self.dry else "tiny sizes" if self.small else ""
        self.start = time.monotonic()
        self.deadline = self.start + 60 * options.minutes
        self.env = environment(dry=self.dry)
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {"name": "dry run" if self.dry else "unknown"}
        self.versions = versions()
        self._children: list[Child] = []
        self._spare: Child | None = None
        kind = "dry-run" if self.dry else "tiny"
        default = scratch() / kind if self.small else HERE / "results"
        self.folder = options.out or default
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def child(self) -> Child:
        """A new worker process. The next one starts meanwhile, for its imports take seconds."""
        made, self._spare = self._spare or self._started(), self._started()
        return made

    def _started(self) -> Child:
        made = Child(self.env, dry=self.dry, small=self.small)
        self._children.append(made)
        return made

    def measure_rate(self) -> dict[str, Any]:
        """The device and its rate for matrix products; the first thing that a section asks.

        Then the kernels of xds are compiled for this device alone. Without them torch's ops would be measured.
        """
        child = self.child()
        try:
            width = 128 if self.small else 8192
            found = child.ask("rate", self.deadline, width=width)
        finally:
            child.end()
        self.about = found["about"]
        note = f"{self.about['name']}, bf16 {width}^3, random values"
        self.add(Row("matrix product", found["flops"] / 1e12, unit=" TFLOP/s", note=note))
        if self.about["capability"]:
            self.env.setdefault("XDS_CUDA_ARCHS", self.about["capability"].replace(".", ""))
        if self._spare is not None:  # it has the variables of before
            self._spare.end()
            self._spare = None
        if self.section not in ("tests", "ops"):
            self._load_kernels()
        return found

    def _load_kernels(self) -> None:
        name = "kernels of xds: load"
        child = self.child()
        try:
            loaded = child.ask("kernels", min(self.deadline, time.monotonic() + 240))
            note = f"{loaded['name']}; built if not cached"
            self.add(Row(name, loaded["seconds"], unit=" s", note=note))
        except Failed as error:
            self.skip(name, f"xds runs with torch's ops: {error}")
        finally:
            child.end()

    def add(self, *rows: Row) -> None:
        """Print rows and write all of them: a section that is killed keeps what it has."""
        for row in rows:
            row.void = row.void or self._void
            self.rows.append(row)
            print_rows([row]) if len(self.rows) == 1 else self._print(row)
        self.write()

    def _print(self, row: Row) -> None:
        print("  ".join(cell for cell in row.cells()).rstrip(), flush=True)

    def skip(self, name: str, reason: str, must: float | None = None, **rest: Any) -> None:
        """A row that was not measured, with the reason."""
        self.add(Row(name, must=must, void=NOT_MEASURED, note=reason, **rest))

    def file(self, ending: str) -> Path:
        """A results file: date, device, section."""
        name = re.sub(r"[^a-z0-9]+", "-", self.about["name"].lower()).strip("-")
        return self.folder / f"{datetime.date.today().isoformat()}-{name}-{self.section}{ending}"

    def write(self) -> None:
        """All rows so far as JSON."""
        content = {
            "section": self.section,
            "date": datetime.datetime.now().isoformat("T", "seconds"),
            "no_results": self._void,
            "device": self.about,
            "versions": self.versions,
            "seconds": round(time.monotonic() - self.start, 1),
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
        }
        partial = scratch() / f"{self.section}.json"
        partial.write_text(json.dumps(content, indent=1) + "\n")
        if self.about["name"] != "unknown":
            shutil.copy(partial, self.file(".json"))

    def end(self) -> None:
        """End every worker."""
        self._spare = None
        for child in self._children:
            child.end()
