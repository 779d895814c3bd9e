"""The program of every rank of `xds bench comm`: checks and times each collective. Rank 0 prints the table."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from ...engine.process.process import join, pick_device
from ...ops.comm.hosts import host_numbers
from ...ops.comm.opening import open_collectives
from ...utils.available_memory import available_bytes
from . import compressed
from .cases import RankContext, largest_bytes, makers_of
from .link import measure
from .plan import HEADING, Baseline, Link, Plan, Row, binary, row, row_text, sizes
from .sharing import Sharing, contexts_of, copies_of, open_sharing
from .timing import check, gather_values, note, timed

_DEFAULT_GPU_BYTES, _DEFAULT_CPU_BYTES = 1 << 30, 64 << 20
_COPIES = 5  # input, output, receive buffer, the backend's buffer, the check's buffer
_PLAIN_COPIES = 2  # where ranks share memory: what a plain copy reads and writes
_SHARE = 0.8  # of the memory that is free


def main(text: str) -> None:
    """Run one rank. Rank 0 prints the table, or one line of JSON."""
    plan = Plan.from_text(text)
    is_cpu = os.environ.get("XDS_BACKEND") in ("gloo", "mpi")
    device = torch.device("cpu") if is_cpu else pick_device()
    group = join(device)
    context = RankContext(open_collectives(group, device), group, getattr(torch, plan.dtype))
    link = measure(context.collectives, group)
    sharing = open_sharing(context)
    facts = {**describe(context, plan), **sharing.facts()}
    shows = context.rank == 0 and not plan.is_json
    if shows:
        print("\n".join(heading(facts, link)), flush=True)
    if plan.compares:
        found = _compare_schemes(context, plan, shows)
    else:
        found = _time_collectives(rows_of(context, plan, link, sharing), shows)
    if context.rank == 0 and plan.is_json:
        shown = asdict(link) if link else None
        print(json.dumps({**facts, "link": shown, **found}), flush=True)


def _time_collectives(timed_rows: Iterator[Row], shows: bool) -> dict[str, Any]:
    """Times every collective, with its line of the table."""
    rows = []
    if shows:
        print(HEADING, flush=True)
    for found in timed_rows:
        rows.append(asdict(found))
        if shows:
            print(row_text(found), flush=True)
    return {"rows": rows}


def _compare_schemes(context: RankContext, plan: Plan, shows: bool) -> dict[str, Any]:
    """Times every scheme of compressed messages, with a sentence for each size."""
    rows, sentences = [], []
    if shows and context.world_size > 1:
        print(compressed.HEADING, flush=True)
    for found in compressed.results_of(context, plan, _largest(context, plan)):
        sentences.append(compressed.sentence(found))
        rows += [asdict(one) for one in found]
        if shows:
            lines = [*map(compressed.row_text, found), sentences[-1]]
            print("\n".join(lines), flush=True)
    if not sentences:
        sentences.append("one rank sends nothing: no scheme pays")
        if shows:
            print(sentences[0], flush=True)
    return {"rows": rows, "sentences": sentences}


def describe(context: RankContext, plan: Plan) -> dict[str, Any]:
    """The machine, the backend and the settings of the run."""
    import torch.distributed as dist

    numbers = host_numbers(context.collectives)
    return {
        "backend": str(dist.get_backend(context.group)),
        "world_size": context.world_size,
        "num_hosts": len(set(numbers)),
        "host": platform.node(),
        "device": _device_name(context.collectives.device),
        "dtype": plan.dtype,
        "torch": torch.__version__,
        "trials": plan.trials,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from ..environment.probes.cpu import cpu_info

    return f"{os.cpu_count()} cores of {cpu_info().get('brand_raw') or platform.machine()}"


def heading(facts: dict[str, Any], link: Link | None) -> Iterator[str]:
    """The lines above the table."""
    hosts = f"{facts['num_hosts']} host" + "s" * (facts["num_hosts"] > 1)
    yield f"{facts['world_size']} ranks, {facts['backend']}, {hosts}: {facts['device']}"
    yield f"link: {link}" if link else "link: nothing to measure"
    yield f"shared memory: {facts['shared_memory']}"
    yield f"{facts['dtype']}; GB/s of 10^9 bytes, time of the slowest rank"


def rows_of(context: RankContext, plan: Plan, link: Link | None, sharing: Sharing) -> Iterator[Row]:
    """The rows of every op, by xds and by the backend itself, at every size."""
    where = Baseline(context.world_size, link)
    max_bytes = _largest(context, plan, _COPIES + _PLAIN_COPIES * sharing.is_used)
    context_of = contexts_of(context, sharing)
    copy_of = copies_of(context, sharing, max_bytes)
    whole = context.world_size * context.dtype.itemsize  # so that every rank has at least one value
    is_alone = context.world_size == 1
    for op in [op for op in plan.ops if not (is_alone and op == "send_recv")]:
        for by, make in makers_of(op, shares_memory=sharing.is_used).items():
            last = largest_bytes(op, max_bytes)
            for asked_bytes in sizes(min(plan.min_bytes, last), last):
                numel = max(asked_bytes // whole, op != "barrier") * context.world_size
                case = make(context_of(by), numel)
                if not check(context, case, f"{op} by {by}, {binary(asked_bytes)}"):
                    break
                size_bytes = numel * context.dtype.itemsize
                timing = timed(context, case, plan, copy_of(size_bytes))
                yield row(op, by, size_bytes, timing, where)
                del case


def _largest(context: RankContext, plan: Plan, copies: int = _COPIES) -> int:
    """The largest size: as requested, or less if the ranks' memory is too small."""
    is_gpu = context.collectives.device.type == "cuda"
    requested = plan.max_bytes or (_DEFAULT_GPU_BYTES if is_gpu else _DEFAULT_CPU_BYTES)
    allowed = int(min(gather_values(context, float(_free_bytes(context)))) * _SHARE / copies)
    largest = max(requested, plan.min_bytes)
    if largest <= allowed:
        return largest
    while largest > max(allowed, plan.min_bytes):
        largest //= 4
    note(
        context,
        f"sizes end at {binary(largest)}: the ranks do not have enough memory for larger ones",
    )
    return max(largest, plan.min_bytes)


def _free_bytes(context: RankContext) -> int:
    if context.collectives.device.type == "cuda":
        return int(torch.cuda.mem_get_info(context.collectives.device)[0])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(context.world_size)))
    available = available_bytes() or 1 << 62  # 0: not Linux, no limit is known
    return available // ranks_here


if __name__ == "__main__":
    main(sys.argv[1])
