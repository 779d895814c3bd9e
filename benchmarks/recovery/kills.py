"""Kills ranks of running trainings, in every phase of a step, and measures how the others go on.

    python benchmarks/recovery/kills.py --kills 1200 --ranks 4

Each run loses all units but one, one or two at a time. A unit is a rank, or `mics` ranks. Above stage 0 without
`mics` the ranks have one copy of the states, and lost ones are replaced.
A run fails if it hangs, ends with an error, leaves processes or files, or has other parameters at its end
than a run without kills: by more than 1e-4, and with one copy by any bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from xds.ops.mesh import Mesh
from xds.recovery.units import units_of

TRAIN = Path(__file__).with_name("train.py")
PHASES = (
    *("forward", "backward", "before sum", "in sum", "before norm", "after norm"),
    *("before update", "after update", "before write", "after write", "before commit"),
    *("after commit", "before group", "after group", "before healing", "after healing"),
    *("outside", "outside", "outside"),
)
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "exception", "SIGSEGV", "SIGSTOP")
COPY_PHASES = (
    "before copy",
    "after copy",
)  # of versions in memory: the second leaves one without manifest
LIMIT_SECONDS = float(os.environ.get("LIMIT_SECONDS", "180"))
TOLERANCE = 1e-4


def plan_of(
    random_: random.Random,
    units_: list[tuple[int, ...]],
    steps: int,
    kills: int,
    *,
    has_one_copy: bool,
) -> list[dict[str, Any]]:
    """What happens to ranks. kills: of a run whose lost ranks are replaced; 0: they are not."""
    count = len(units_)
    phases = (*PHASES, *COPY_PHASES) if has_one_copy else PHASES
    if (
        kills and count == 2 and not has_one_copy
    ):  # the other unit has the only states while new processes copy them
        phases = tuple(phase for phase in PHASES if "group" not in phase and "healing" not in phase)
    units = [random_.choice(unit) for unit in random_.sample(units_, count - 1)]
    if kills:
        units = [random_.choice(random_.choice(units_)) for _ in range(kills)]
    step, plan = 3, []
    for number, unit in enumerate(units):
        # else together with the one before
        if random_.random() > 0.2 or (kills and count == 2 and not has_one_copy):
            step += random_.randint(2, max(3, steps // (len(units) + 1)))
        phase, how = random_.choice(phases), random_.choice(SIGNALS)
        if how == "exception" and phase.endswith(("write", "commit")):
            how = "SIGKILL"  # a save that fails raises on all ranks, with recovery as well
        plan.append({"number": number, "unit": unit, "step": step, "phase": phase, "signal": how})
    return plan


def run(
    out: Path, plan: list[dict[str, Any]], ranks: int, steps: int, spares: int = 0
) -> tuple[str, list[Any]]:
    """Run once. Returns what is wrong, or "", and the records of all units."""
    out.mkdir()
    inside = [entry for entry in plan if entry["phase"] != "outside"]
    environ = {**os.environ, "OUT": str(out), "STEPS": str(steps), "PLAN": json.dumps(inside)}
    environ["OMP_NUM_THREADS"] = "1"
    launcher = Path(sys.executable).with_name("xds")
    command = [str(launcher), "--recover", "--nproc-per-node", str(ranks)]
    command += ["--spares", str(spares)]
    with open(out / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*command, "--log-dir", str(out / "logs"), str(TRAIN)],
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        outside = [entry for entry in plan if entry["phase"] == "outside"]
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            outside = [entry for entry in outside if not kill_outside(out, entry)]
            time.sleep(0.001 if outside else 0.05)
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "hang", records(out)
    found = records(out)
    left = [record["start"] for record in found if "start" in record and is_alive(record["start"])]
    if process.returncode:
        return f"exit code {process.returncode}", found
    return f"processes left: {left}" if left else "", found


def kill_outside(out: Path, entry: dict[str, Any]) -> bool:
    """Kill the unit at a random instant once it has done the step. Returns whether it did."""
    path = out / f"unit{entry['unit']}.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if '"world"' in line]
    steps = [line["step"] for line in lines]
    if entry["step"] not in steps or os.environ["FULL"] not in ("", str(lines[-1]["world"])):
        return False
    pid = [json.loads(line) for line in text.splitlines() if '"start"' in line][-1]["start"]
    if not is_alive(pid):
        return False  # the next process of the unit
    time.sleep(random.random() * 0.03)
    name = "SIGKILL" if entry["signal"] == "exception" else entry["signal"]
    with open(out / "outside.jsonl", "a") as file:
        file.write(
            json.dumps({"seconds": time.time(), "kill": "outside", "unit": entry["unit"]}) + "\n"
        )
    os.kill(pid, getattr(signal, name))
    return True


def records(out: Path) -> list[Any]:
    found = []
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            unit = {"unit": int(path.stem[4:])} if path.stem != "outside" else {}
            found.append({**unit, **json.loads(line)})
    return sorted(found, key=lambda record: record["seconds"])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def waits(found: list[Any], *, has_one_copy: bool) -> list[float]:
    """Seconds from each kill to the next step of a unit that is left; with one copy, of the new process."""
    result = []
    for number, record in enumerate(found):
        if "kill" in record:
            later = [
                other["seconds"] - record["seconds"]
                for other in found[number + 1 :]
                if "step" in other
                and "kill" not in other
                and (other["unit"] == record["unit"]) == has_one_copy
            ]
            result += later[:1]
    return result


def show(ranks: int, runs: int, failed: int, seconds: list[float], phases: Counter[str]) -> None:
    print(f"{phases.total()} kills in {runs} runs of {ranks} ranks; {failed} runs failed")
    if seconds:
        seconds.sort()
        p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        print(
            f"kill to the next step: p50 {statistics.median(seconds):.2f} s, p99 {p99:.2f} s, "
            f"longest {seconds[-1]:.2f} s"
        )
    print(", ".join(f"{phase} {count}" for phase, count in sorted(phases.items())))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--mics", type=int, default=1, help="ranks of a shard group")
    parser.add_argument("--pipe", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--signal", default="", help="this one only")
    parser.add_argument("--spares", type=int, default=0, help="lost ranks are replaced")
    parser.add_argument("--kills-per-run", type=int, default=6, help="with --spares")
    return parser.parse_args()


def main() -> None:
    args = options()
    os.environ |= {"STAGE": str(args.stage), "MICS": str(args.mics), "PIPE": str(args.pipe)}
    if args.pipe > 1:
        os.environ.setdefault("ACCUMULATION", "4")
    units = units_of(Mesh(pipe=args.pipe, data=args.ranks // args.pipe), args.mics)
    # a kill waits until all ranks are there, where none but the killed unit and another one have states
    has_one_copy = args.stage > 0 and args.mics == 1
    is_pair = args.spares and len(units) == 2 and not has_one_copy
    os.environ["FULL"] = str(args.ranks) if is_pair else ""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    before = {path.name for path in Path("/dev/shm").iterdir()}
    problem, found = run(folder / "reference", [], args.ranks, args.steps)
    assert not problem, f"{problem}: {folder}"
    checks = next(record["checks"] for record in found if "end" in record)
    random_ = random.Random(args.seed)
    kills, seconds, problems, phases = 0, [], [], Counter[str]()
    number = 0
    while kills < args.kills:
        number += 1
        replaced = args.kills_per_run if args.spares or has_one_copy else 0
        plan = plan_of(random_, units, args.steps, replaced, has_one_copy=has_one_copy)
        if args.signal:
            plan = [{**entry, "signal": args.signal} for entry in plan]
        out = folder / f"run{number}"
        problem, found = run(out, plan, args.ranks, args.steps, args.spares)
        ends = [record for record in found if "end" in record]
        if not problem and not ends:
            problem = "no unit has ended"
        for end in ends:
            differs = max(
                abs(a - b) / max(1.0, abs(b)) for a, b in zip(end["checks"], checks, strict=True)
            )
            tolerance = 0.0 if has_one_copy else TOLERANCE
            if not problem and (differs > tolerance or end["end"] != args.steps):
                problem = f"differs by {differs:.1e} after {end['end']} steps"
        killed = [record for record in found if "kill" in record]
        kills += len(killed)
        phases.update(record["kill"] for record in killed)
        waited = waits(found, has_one_copy=has_one_copy)
        seconds += waited
        if problem:
            problems.append(f"{problem}: {out}: {json.dumps(plan)}")
            print(problems[-1], flush=True)
        else:
            shutil.rmtree(out)
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    show(args.ranks, number, len(problems), seconds, phases)
    print(f"files left in shared memory: {sum(name.startswith('xds') for name in left)}")
    sys.exit(bool(problems))


main()
