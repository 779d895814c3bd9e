"""Runs cases in warm processes: the ranks of each number, and one for plain PyTorch. One verdict a case.

Processes stay from case to case. What hangs, crashes or leaves ranks apart ends with the processes, and a
failure counts only if it comes again in fresh ones; else the cases before it have a part in it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from helpers import _context as context

CASE_SECONDS = 20.0
START_SECONDS = 90.0
OTHERS_SECONDS = 4.0  # after the first rank has failed
PLAIN = 0  # the "number of ranks" of plain PyTorch's process
SAID = 400  # characters of a message
# At stage 3 a parameter that is away is one NaN, expanded: torch itself refuses to write to it.
TORCH_REFUSES = "more than one element of the written-to tensor refers to a single memory location"


@dataclass(frozen=True)
class Job:
    """A case to run: its seed, what is left out of it, or alone kept, and what is set otherwise."""

    seed: int
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    def case(self) -> Any:
        from .draw import draw

        return draw(self.seed, drop=self.drop, keep=self.keep, **dict(self.changes))


@dataclass(frozen=True)
class Verdict:
    """What came of a case: equal, refused, wrong, hang, crash, error; or nothing that could be compared.

    sensitive: what differs is what roundings alone make of it, tried with plain PyTorch (compare.py).
    beyond range: plain PyTorch comes to inf or nan. invalid: plain PyTorch fails.
    """

    job: Job
    outcome: str
    said: str = ""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("wrong", "hang", "crash", "error")


class Group:
    """`world_size` gloo processes, or one that knows nothing of ranks (PLAIN)."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_fresh = True

    def send(self, job: Job, noise: int = 0) -> None:
        self._is_fresh, told = not self._ranks, str(job.case())
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps((job, told, noise)))

    @property
    def is_fresh(self) -> bool:
        """The last case was the first of its processes."""
        return self._is_fresh

    def answers(self) -> list[tuple[str, Any]]:
        """(kind, value or message) of each rank: done, refused, error, crash or hang."""
        seconds = CASE_SECONDS + (START_SECONDS if self._is_fresh else 0)
        deadline = time.monotonic() + seconds
        found: dict[int, tuple[str, Any]] = {}
        while len(found) < len(self._ranks) and time.monotonic() < deadline:
            waiting = {p: r for r, (_, p) in enumerate(self._ranks) if r not in found}
            for pipe in wait(list(waiting), timeout=deadline - time.monotonic()):
                rank = waiting[pipe]
                found[rank] = self._answer(rank)
                if found[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        for rank in range(len(self._ranks)):
            if rank not in found:
                found[rank] = ("hang", self._stacks(rank))
        if any(kind != "done" for kind, _ in found.values()):
            self.stop()
        return [found[rank] for rank in sorted(found)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        process, pipe = self._ranks[rank]
        try:
            answer: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
            return answer
        except (EOFError, OSError):
            process.join(5)
            return "crash", f"exit code {process.exitcode}\n{self._told(rank)}"

    def _stacks(self, rank: int) -> str:
        process, _ = self._ranks[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.3)
        return self._told(rank)

    def _told(self, rank: int) -> str:
        assert self._folder is not None
        path = Path(self._folder.name) / f"stacks{rank}"
        return path.read_text()[-6000:] if path.exists() else ""

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(max(self.world_size, 1)):
            here, there = context.Pipe()
            args = (rank, self.world_size, self._folder.name, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def stop(self) -> None:
        """End the processes; the next case starts new ones."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()


def _serve(rank: int, world_size: int, folder: str, pipe: Any) -> None:
    import torch

    from . import plain, sharded

    file = open(Path(folder) / f"stacks{rank}", "w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if world_size != PLAIN:
        _join(rank, world_size, folder)
    while True:
        try:
            job, told, noise = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        train = partial(plain.train, noise=noise) if world_size == PLAIN else sharded.train
        pipe.send_bytes(pickle.dumps(_outcome(train, job, told)))


def _outcome(train: Any, job: Job, told: str) -> tuple[str, Any]:
    import xds
    from xds.utils.errors import DamagedError

    case = job.case()
    if str(case) != told:
        return "error", f"the fuzzer's own files changed while it ran: {case} here, {told} there"
    try:
        return "done", train(case)
    except DamagedError as error:  # of a checkpoint that was saved a moment ago
        return "error", f"DamagedError: {error}"
    except (xds.UsageError, xds.ConfigError) as error:
        return "refused", f"{type(error).__name__}: {error}"
    except BaseException as error:
        if TORCH_REFUSES in str(error):
            return "refused", f"{type(error).__name__}: {error}"
        told = "".join(traceback.format_exception(error)[-8:])
        kind = "hang" if type(error).__name__ == "PeerError" else "error"
        return kind, f"{type(error).__name__}: {error}\n{told}"


def _join(rank: int, world_size: int, folder: str) -> None:
    import logging
    from datetime import timedelta

    import torch.distributed as dist

    logging.getLogger("xds").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    timeout = timedelta(seconds=CASE_SECONDS - 5)
    where = f"file://{folder}/rendezvous"
    os.environ["XDS_TIMEOUT_SECONDS"] = str(CASE_SECONDS - 5)
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world_size, timeout=timeout
    )


class Runner:
    """Keeps the processes; `close` ends them."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def _group(self, world_size: int) -> Group:
        return self._groups.setdefault(world_size, Group(world_size))

    def run(self, job: Job) -> Verdict:
        """The verdict; a failure is tried again in fresh processes."""
        first = self._once(job)
        if not first.is_failure or self._group(job.case().world_size).is_fresh:
            return first
        self._group(job.case().world_size).stop()
        second = self._once(job)
        if second.is_failure:
            return second
        return Verdict(job, first.outcome, f"(only after other cases) {first.said}", first.seconds)

    def _once(self, job: Job) -> Verdict:
        from .compare import differences, is_beyond_range

        start = time.monotonic()
        case = job.case()
        ranks, plain = self._group(case.world_size), self._group(PLAIN)
        ranks.send(job)
        plain.send(job)
        ours, theirs = ranks.answers(), plain.answers()
        seconds = time.monotonic() - start
        if theirs[0][0] != "done":
            return Verdict(job, "invalid", theirs[0][1], seconds)
        outcome, said = _together(ours)
        if outcome == "done":
            want, got = theirs[0][1], [value for _, value in ours]
            found = differences(case, want, got)
            outcome, said = ("wrong", "; ".join(found[:4])) if found else ("equal", "")
            if found and is_beyond_range(want):
                outcome = "beyond range"
            elif found and not differences(case, want, got, self._noisy(job)):
                outcome = "sensitive"
        return Verdict(job, outcome, said, seconds)

    def _noisy(self, job: Job) -> list[Any]:
        """What plain PyTorch makes of the case where gradients are wrong by a rounding; and in fp64."""
        from . import plain

        found = []
        for noise in (1, 2, *((plain.EXACT,) if job.case().precision == "fp32" else ())):
            self._group(PLAIN).send(job, noise)
            kind, value = self._group(PLAIN).answers()[0]
            found += [value] if kind == "done" else []
        return found

    def close(self) -> None:
        for group in self._groups.values():
            group.stop()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _together(answers: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """One outcome of all ranks: the worst, told by the rank that met it."""
    kinds = [kind for kind, _ in answers]
    if set(kinds) == {"done"}:
        return "done", ""
    for kind in ("crash", "error"):
        own = [a for a in answers if a[0] == kind and "Connection" not in str(a[1])]
        if own:
            return kind, str(own[0][1])
    if set(kinds) == {"refused"}:
        return "refused", str(answers[0][1])
    told = "\n".join(
        f"rank {rank} {kind}: {value if kind != 'done' else ''}"
        for rank, (kind, value) in enumerate(answers)
    )
    return "hang", told


@dataclass
class Summary:
    """Counts of verdicts, and the failures."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[Verdict] = field(default_factory=list)  # and what could not be compared
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.outcomes[verdict.outcome] += 1
        self.seconds += verdict.seconds
        if verdict.outcome == "refused":
            self.refusals[verdict.said.splitlines()[0][:SAID]] += 1
        if verdict.outcome not in ("equal", "refused"):
            self.failures.append(verdict)
        if verdict.is_failure:
            self.features.update(verdict.job.case().names)


def jobs(first: Job, worlds: Iterable[int]) -> Iterator[Job]:
    """Like `first`, its seed and the following ones, whose cases have one of these numbers of ranks."""
    allowed = set(worlds)
    for seed in itertools.count(first.seed):
        job = replace(first, seed=seed)
        if job.case().world_size in allowed:
            yield job
