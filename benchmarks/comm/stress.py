"""Kill, stop and continue ranks at random moments of random collectives in shared memory; every sum is checked.

    python benchmarks/comm/stress.py [--events 10000] [--side-by-side 3] [--seconds 0] [--seed 0]

Claim: after a stop and a continue all goes on with right values. After a kill, or a stop longer than the
timeout, every other rank raises a PeerError that names the rank. Never a hang, a wrong value, or anything left.
An event is one signal: SIGSTOP, SIGCONT or SIGKILL. Survivors go on in a new group with a new process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from harness import ONE_THREAD, machine  # noqa: E402
from stress_ranks import serve  # noqa: E402

TIMEOUT_SECONDS = 3.0  # of a wait
PATIENCE_SECONDS = 0.5  # for the reports of other ranks; 3 s in training
HANG_SECONDS = 30.0
PAUSES = (2, 16)  # stops and continues before a group ends
WAYS = ("kill",) * 18 + ("kill two", "kill a stopped one", "long stop", "stop all", "clean")

context = multiprocessing.get_context("forkserver")


class Hang(Exception):
    """A rank did not answer."""


class Tally:
    """What happened, in all groups."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.checked = 0
        self.noticed: list[float] = []  # seconds from a kill until a survivor noticed it
        self.raised: list[float] = []  # until its PeerError
        self.stopped: list[float] = []  # seconds from a long stop until a PeerError
        self.grown = self.longest = 0
        self.problems: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.events.values())

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)
            print(f"PROBLEM: {text}", flush=True)


class Group:
    """Ranks that are started, signalled, and started again."""

    def __init__(self, world: int, seed: int, tally: Tally) -> None:
        self.world, self.seed, self.tally = world, seed, tally
        self.rng = random.Random(seed)
        self.ranks: list[Any] = [None] * world
        self.pipes: list[Any] = [None] * world
        self.descriptors: dict[int, list[int]] = {}  # by process: before each of its groups
        self.lives = 0

    # -- processes --------------------------------------------------------------------------------------

    def start_missing(self) -> None:
        for rank in range(self.world):
            if self.ranks[rank] is not None:
                continue
            here, there = context.Pipe()
            arguments = (rank, self.world, there, TIMEOUT_SECONDS, PATIENCE_SECONDS)
            process = context.Process(target=serve, args=arguments)
            process.start()
            there.close()
            self.ranks[rank], self.pipes[rank] = process, here

    def send(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, number)
            with self.tally.lock:
                self.tally.events[number.name] += 1

    def forget(self, rank: int) -> None:
        self.pipes[rank].close()
        self.ranks[rank].kill()
        self.ranks[rank].join()
        self.ranks[rank] = None

    def answer(self, rank: int, what: str) -> tuple[str, dict[str, Any]]:
        """The next answer of a rank. Raises Hang."""
        try:
            if self.pipes[rank].poll(HANG_SECONDS):
                answer: tuple[str, dict[str, Any]] = self.pipes[rank].recv()
                return answer
        except EOFError:
            return "died", {"text": f"rank {rank} died by itself"}
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, signal.SIGUSR1)  # writes where it is
        time.sleep(1)
        raise Hang(f"rank {rank} of {self.world} gave no answer after {what}")

    # -- one life of the group --------------------------------------------------------------------------

    def live(self) -> None:
        """Open a group, disturb it, end it in a random way. After a problem all ranks start anew."""
        self.lives += 1
        way = self.rng.choice(WAYS)
        if self.world == 2 and way == "kill two":
            way = "kill"
        try:
            self.start_missing()
            with tempfile.TemporaryDirectory(prefix="stress-") as folder:
                for pipe in self.pipes:
                    pipe.send(("open", f"{folder}/store", 100_000 * self.seed + self.lives))
                opened = [self.answer(rank, "the order to open") for rank in range(self.world)]
                if any(kind != "opened" for kind, _ in opened):
                    raise Hang(
                        f"no group was opened: {[one for one in opened if one[0] != 'opened']}"
                    )
                for rank, (_, found) in enumerate(opened):
                    self.compare_descriptors(rank, found["descriptors"])
                self.disturb()
                self.end(way)
            self.tally.ends[way] += 1
        except Hang as error:
            self.tally.problem(f"group {self.seed}, life {self.lives}, {way}: {error}")
            for rank in range(self.world):
                self.forget(rank)

    def disturb(self) -> None:
        """Short stops of one rank or several, at random moments."""
        for _ in range(self.rng.randint(*PAUSES)):
            time.sleep(self.rng.random() ** 3 * 0.02)
            some = self.rng.sample(range(self.world), self.rng.choice((1, 1, 1, 2)))
            for rank in some:
                self.send(rank, signal.SIGSTOP)
                time.sleep(self.rng.choice((0, 0.001)))
            time.sleep(self.rng.random() ** 4 * 0.08)
            for rank in self.rng.sample(some, len(some)):
                self.send(rank, signal.SIGCONT)
        time.sleep(self.rng.random() * 0.02)

    def end(self, way: str) -> None:
        if way == "clean":
            self.pipes[self.rng.randrange(self.world)].send(("stop",))
            self.expect("stopped", range(self.world), way)
        elif way == "long stop":
            self.stop_long()
        elif way == "stop all":
            self.stop_all()
        else:
            self.kill(way)

    def kill(self, way: str) -> None:
        victims = self.rng.sample(range(self.world), 2 if way == "kill two" else 1)
        if way == "kill a stopped one":
            self.send(victims[0], signal.SIGSTOP)
            time.sleep(self.rng.random() * 0.3)
        begin = time.monotonic()
        for rank in victims:
            self.send(rank, signal.SIGKILL)
        others = [rank for rank in range(self.world) if rank not in victims]
        for rank, found in self.expect("failed", others, way).items():
            self.names(rank, found["text"], victims)
            with self.tally.lock:
                self.tally.noticed.append(found["noticed"] - begin)
                self.tally.raised.append(found["raised"] - begin)
        for rank in victims:
            self.forget(rank)

    def stop_long(self) -> None:
        victim = self.rng.randrange(self.world)
        self.send(victim, signal.SIGSTOP)
        begin = time.monotonic()
        others = [rank for rank in range(self.world) if rank != victim]
        for rank, found in self.expect("failed", others, "a long stop").items():
            self.names(rank, found["text"], [victim])
            self.tally.stopped.append(found["raised"] - begin)
        self.send(victim, signal.SIGCONT)  # it may get right values of before, and fails then
        self.expect("failed", [victim], "the end of a long stop")

    def stop_all(self) -> None:
        """All for longer than the timeout, as when a scheduler suspends a job: nobody has waited for long."""
        everyone = range(self.world)
        for rank in everyone:
            self.send(rank, signal.SIGSTOP)
        time.sleep(TIMEOUT_SECONDS + 0.5)
        for rank in everyone:
            self.send(rank, signal.SIGCONT)
        time.sleep(0.3)
        self.end("clean")

    def expect(self, want: str, ranks: Any, way: str) -> dict[int, dict[str, Any]]:
        """The answers of these ranks, which are of the kind `want`; others are problems."""
        good = {}
        for rank in ranks:
            kind, found = self.answer(rank, way)
            self.tally.checked += found.get("checked", 0)
            if kind != want:
                raise Hang(f"rank {rank} of {self.world} {kind}: {found.get('text', '')}")
            if found.get("again", 0) > 1:
                self.tally.problem(f"a second wait in a failed group took {found['again']:.1f} s")
            good[rank] = found
        return good

    def compare_descriptors(self, rank: int, now: int) -> None:
        seen = self.descriptors.setdefault(self.ranks[rank].pid, [])
        seen.append(now)
        self.tally.longest = max(self.tally.longest, len(seen))
        if len(seen) > 2:  # the first one was before its first group
            self.tally.grown = max(self.tally.grown, now - seen[1])

    def names(self, rank: int, text: str, victims: list[int]) -> None:
        """The message of `rank` names one of the victims as the reason."""
        for victim in victims:
            listed = rf"ranks? (\d+, )*{victim}(, \d+)* did not report"
            if re.search(rf"{listed}|by rank {victim}\b|for rank {victim}\b", text):
                return
        self.tally.problem(f"rank {rank} does not name {victims}: {text}")

    def finish(self) -> None:
        """End all ranks as scripts end."""
        for rank in range(self.world):
            if self.ranks[rank] is None:
                continue
            self.pipes[rank].send(("end",))
            self.ranks[rank].join(20)
            if self.ranks[rank].exitcode != 0:
                self.tally.problem(f"rank {rank} ended with {self.ranks[rank].exitcode}")
            self.forget(rank)


# -- the run ------------------------------------------------------------------------------------------------


def disturb_until(tally: Tally, number: int, seed: int, is_over: Any) -> None:
    worlds = (2, 3, 4)
    group = Group(worlds[number % len(worlds)], seed + number, tally)
    while not is_over():
        group.live()
        if group.lives % 40 == 0:  # with another number of ranks
            group.finish()
            lives, group = (
                group.lives,
                Group(worlds[(number + group.lives // 40) % 3], group.seed, tally),
            )
            group.lives = lives
    group.finish()


def main() -> int:
    """Run until there were so many events, or so many seconds have passed; 1 if there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--side-by-side", type=int, default=3, help="groups at a time")
    parser.add_argument(
        "--seconds", type=float, default=0, help="end after so long; 0: at the events"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the results to a file")
    options = parser.parse_args()
    os.environ.update(ONE_THREAD)
    context.set_forkserver_preload(["torch", "torch.distributed", "xds.ops.comm.opening"])
    before = set(os.listdir("/dev/shm"))
    begin, tally = time.monotonic(), Tally()

    def is_over() -> bool:
        spent = time.monotonic() - begin
        return tally.total >= options.events or 0 < options.seconds < spent

    threads = [
        threading.Thread(target=disturb_until, args=(tally, number, options.seed, is_over))
        for number in range(options.side_by_side)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = set(os.listdir("/dev/shm")) - before
    if left:
        tally.problem(f"files are left in /dev/shm: {sorted(left)}")
    if multiprocessing.active_children():
        tally.problem(f"processes are left: {multiprocessing.active_children()}")
    seconds = time.monotonic() - begin
    show(tally, seconds)
    if options.keep:
        keep(tally, seconds, options.seed)
    return 1 if tally.problems else 0


def _times(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}, at most {max(values):.2f}"


def rows(tally: Tally, seconds: float) -> list[tuple[str, object]]:
    names = {"SIGSTOP": "stops", "SIGCONT": "continues", "SIGKILL": "kills"}
    return [
        ("events", tally.total),
        *((text, tally.events[name]) for name, text in names.items()),
        ("stops longer than the timeout", tally.ends["long stop"]),
        ("collectives checked", tally.checked),
        ("seconds until a kill is noticed", _times(tally.noticed)),
        ("seconds until the PeerError", _times(tally.raised)),
        (f"the same of a long stop, timeout {TIMEOUT_SECONDS:.0f}", _times(tally.stopped)),
        ("groups one after the other in a process, at most", tally.longest),
        ("growth of its descriptors", tally.grown),
        ("hangs, wrong values, wrong names, leftovers", len(tally.problems)),
        ("minutes", f"{seconds / 60:.1f}"),
    ]


def show(tally: Tally, seconds: float) -> None:
    print("| what | found |\n|---|---|")
    for name, value in rows(tally, seconds):
        print(f"| {name} | {value} |")


def keep(tally: Tally, seconds: float, seed: int) -> None:
    """Write the results to results/<date>-stress-<processor>.json."""
    about = machine()
    words = about["cpu"].lower().replace("(r)", "").split()[:2]
    today = datetime.date.today().isoformat()
    path = HERE / "results" / f"{today}-stress-{os.cpu_count()}-core-{'-'.join(words)}.json"
    content = {
        "date": today,
        "machine": about,
        "seed": seed,
        "rows": dict(rows(tally, seconds)),
        "groups": dict(tally.ends),
        "problems": tally.problems,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"results: {path.relative_to(HERE.parents[1])}")


if __name__ == "__main__":
    sys.exit(main())
