"""`xds plan --measured`: runs two real steps on this machine, and shows planned and measured bytes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...engine.planning.plan import Plan, RankPlan
from ...utils.errors import UsageError
from ...utils.sizes import size_text
from .text import MESSAGES, counted, place_text, table_text

HELD = ("param", "grad", "master", "optimizer", "host", "disk")
RANKS_PER_CORE = 8
STDERR = 2  # the file descriptor


def show(plan: Plan, options: argparse.Namespace) -> None:
    """Start the ranks, and print the tables.

    Raises:
        UsageError: there are too many ranks for this machine, or a rank has failed.
    """
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    if plan.mesh.size > most:
        raise UsageError(
            f"--measured with --world-size = {plan.mesh.size}: this machine can start {most} ranks; lower "
            "--world-size, or remove --measured"
        )
    with tempfile.TemporaryDirectory() as folder:
        _run(plan.mesh.size, options, folder)
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(plan.mesh.size)
        ]
    print(measured_text(plan, ranks), end="")


def measured_text(plan: Plan, ranks: list[dict[str, Any]]) -> str:
    """Planned and measured bytes of one rank of each share, and how many ranks are as planned.

    ranks: for each rank "held", "sent" and "seconds", see measured_rank.py.
    """
    kinds_held = [kind for kind in HELD if any(rank["held"].get(kind) for rank in ranks)]
    kinds_sent = [kind for kind in MESSAGES if any(rank["sent"].get(kind) for rank in ranks)]
    held, sent, num_equal = [], [], 0
    for each in plan.ranks:
        share = each.share
        place = place_text(plan, [share.pipe], share.tensors)
        for at, rank in enumerate(_ranks_of(plan, each)):
            pairs_held = _held(each, ranks[rank], kinds_held)
            pairs_sent = _sent(each, ranks[rank], kinds_sent)
            num_equal += all(planned == found for planned, found in pairs_held + pairs_sent)
            if at == 0:
                held.append((place, [_pair(*pair) for pair in pairs_held]))
                sent.append((place, [_pair(*pair) for pair in pairs_sent]))
    seconds = max(rank["seconds"] for rank in ranks)
    titles = [MESSAGES[kind] for kind in kinds_sent]
    return (
        "\nHeld after a real step: planned, and measured where it differs\n"
        f"{table_text(kinds_held, held)}\n\n"
        "Sent in it: planned, and measured where it differs\n"
        f"{table_text(titles, sent)}\n\n"
        f"  {num_equal} of {counted(len(ranks), 'rank')} as planned; the step took {seconds:.3f} s\n"
    )


def _ranks_of(plan: Plan, each: RankPlan) -> list[int]:
    """The ranks that have this share."""
    return [
        plan.mesh.rank_at(pipe=each.share.pipe, data=data, sequence=sequence, tensor=tensor)
        for data in range(plan.mesh.data)
        for sequence in range(plan.mesh.sequence)
        for tensor in each.share.tensors
    ]


def _held(each: RankPlan, found: dict[str, Any], kinds: list[str]) -> list[tuple[int, int]]:
    return [(each.states.get(kind, 0), found["held"].get(kind, 0)) for kind in kinds]


def _sent(each: RankPlan, found: dict[str, Any], kinds: list[str]) -> list[tuple[int, int]]:
    planned = {kind: link.total for kind, link in each.sent.items()}
    return [(planned.get(kind, 0), found["sent"].get(kind, 0)) for kind in kinds]


def _pair(planned: int, measured: int) -> str:
    if planned == measured:
        return size_text(planned) if planned else "-"
    return f"{size_text(planned)} ({size_text(measured)})"


def _run(world_size: int, options: argparse.Namespace, folder: str) -> None:
    words = [options.config, options.model, folder, str(options.sequence_length or "")]
    words += ["trusts code"] if options.trust_remote_code else []
    # imports nothing from the working folder
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [
        *(sys.executable, *safe, "-m", "xds.launcher.cli", "--quiet", "--launcher", "local"),
        *("--nproc-per-node", str(world_size), "--module"),
        *("xds.launcher.planning.measured_rank", *words),
    ]
    done = subprocess.run(command, stdout=STDERR)  # the plan alone is on standard output
    if done.returncode:
        raise UsageError(f"--measured: the ranks ended with exit code {done.returncode}")


__all__ = ["measured_text", "show"]
