"""A job on 2,048 hosts with a stub for ssh: the head's own CPU time, concurrent connections, one bad host.

The stub (stub_ssh.c, set with XDS_SSH) replaces the node process. Own CPU time is getrusage(RUSAGE_SELF) of the
process that runs the command line, including imports; that of its children is not included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from harness import Row, Watch, finish  # noqa: E402

MUST_SECONDS = 10.0
TORN_DOWN_SECONDS = 30.0
HEAD = """\
import json, resource, sys
from xds.launcher.cli import main
code = main(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_SELF)
with open(sys.argv[1], "w") as file:
    json.dump({"cpu": used.ru_utime + used.ru_stime, "peak_kib": used.ru_maxrss}, file)
sys.exit(code)
"""
BAD_PLACE = 0.6  # which host is the bad one, as a share of all


@dataclass
class Run:
    """The result of one run of the head."""

    code: int
    said: str
    cpu_seconds: float
    wall_seconds: float
    peak_mib: float
    most_connecting: int
    num_connected: int
    stubs_left: int


def run_head(num_hosts: int, stub: Path, how: str) -> Run:
    """Run one job on `num_hosts` hosts. how: "" all are good; denied, silent: one is not."""
    with tempfile.TemporaryDirectory(prefix="fan-out-") as folder:
        hostfile, log, result = (Path(folder, name) for name in ("hosts", "log", "result"))
        names = [f"node{number:04}" for number in range(num_hosts)]
        hostfile.write_text("".join(f"{name} slots=8\n" for name in names))
        script = Path(folder, "train.py")
        script.write_text("")
        bad = names[int(num_hosts * BAD_PLACE)] if how else ""
        environment = {
            **os.environ,
            **{"XDS_SSH": str(stub), "STUB_LOG": str(log), "STUB_BAD": bad, "STUB_HOW": how},
            "PYTHONSAFEPATH": "1",
        }
        words = [sys.executable, "-c", HEAD, str(result), "--hostfile", str(hostfile), str(script)]
        begin = time.perf_counter()
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
        wall_seconds = time.perf_counter() - begin
        used = json.loads(result.read_text()) if result.exists() else {"cpu": 0, "peak_kib": 0}
        most = now = total = 0
        for line in log.read_text().splitlines():
            now += 1 if line[0] == "+" else -1
            most, total = max(most, now), total + (line[0] == "+")
        return Run(
            code=done.returncode,
            said=done.stderr,
            cpu_seconds=used["cpu"],
            wall_seconds=wall_seconds,
            peak_mib=used["peak_kib"] / 1024,
            most_connecting=most,
            num_connected=total,
            stubs_left=count_running(stub),
        )


def count_running(stub: Path) -> int:
    """The number of processes of that program."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/exe"):
        try:
            found += os.readlink(path) == str(stub)
        except OSError:
            continue
    return found


def rows_of(num_hosts: int, stub: Path, how: str) -> list[Row]:
    """The head's CPU time, and the other conditions of the row."""
    with Watch() as watch:
        run = run_head(num_hosts, stub, how)
    bad = f"node{int(num_hosts * BAD_PLACE):04}"
    wrong = ""
    if how and (run.code == 0 or bad not in run.said or run.said.count("\n") > 5):
        wrong = f"VOID: exit code {run.code}, it said {run.said[-300:]!r}"
    if not how and (run.code != 0 or run.num_connected != num_hosts):
        wrong = f"VOID: exit code {run.code}, {run.num_connected} connections: {run.said[-300:]!r}"
    if run.stubs_left:
        wrong = f"VOID: {run.stubs_left} connections left"
    title = {"": "all good", "denied": "one lets nobody in", "silent": "one never answers"}[how]
    name = f"{num_hosts:,} hosts, {title}"
    note = f"at most {run.most_connecting} connecting, peak {run.peak_mib:.0f} MiB"
    rest = {"void": wrong, "unit": " s", "others_busy": watch.others}
    rows = [
        Row(f"own CPU, {name}", run.cpu_seconds, must=MUST_SECONDS, note=note, **rest),
        Row(f"whole run, {name}", run.wall_seconds, note="children on the same cores", **rest),
    ]
    if how == "denied":  # a silent one has what ssh's own time limit allows it, first
        rows[1].must = TORN_DOWN_SECONDS
    return rows


def build_stub(folder: Path) -> Path:
    """Compile the stub with the machine's C compiler."""
    stub = folder / "stub_ssh"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-o", stub, FOLDER / "stub_ssh.c"], check=True)
    return stub


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2048)
    parser.add_argument("--no-save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stub-") as folder:
        stub = build_stub(Path(folder))
        rows = [row for how in ("", "denied", "silent") for row in rows_of(asked.hosts, stub, how)]
    return finish(FOLDER, rows, keeps=not asked.no_save)


if __name__ == "__main__":
    sys.exit(main())
