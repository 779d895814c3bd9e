"""The result of a search as text: its rows, what each gives up, and why the second one lost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ...engine.planning.goodput import goodput_of
from ...engine.planning.machine import Machine
from ...engine.planning.search import RESERVE, Found, Row
from ...engine.planning.seconds import PARTS
from ...utils.quoting import printable
from ...utils.sizes import size_text
from ..planning.text import counted, table_text

HEAD = [
    "layout",
    "stage",
    "micro x steps",
    "order",
    "memory",
    "step",
    "tokens/s",
    "MFU",
    "gives up",
]


def rows_text(found: Found, machine: Machine, world_size: int) -> str:
    """All of it."""
    best = found.rows[0]
    plan = best.plan
    samples = counted(plan.config.train_batch_size, "sample")
    head = (
        f"{printable(plan.name)}: {plan.num_parameters:,} parameters on {counted(world_size, 'rank')} of "
        f"{printable(machine.name)}, {samples} in a step of the best\n"
        f"  {found.num_points:,} layouts; {len(found.tried):,} planned, {found.too_large:,} do not fit into "
        f"{size_text(found.limit_bytes)} ({1 - RESERVE:.0%} of a device)"
    )
    rows = []
    for number, row in enumerate(found.rows, 1):
        rows.append((str(number), row_cells(row)))
        rows += [("", ["", *row_cells(each)[1:]]) for each in found.variants[row.name]]
    parts = [head, table_text(HEAD, rows), _parts(best)]
    if len(found.rows) > 1:
        parts.append(_why_lost(best, found.rows[1]))
    if found.num_left:
        parts.append(
            f"The time of the search was over: {found.num_left:,} layouts, estimated to be slower than those "
            "that were tried, were left out. --seconds gives more."
        )
    if found.refused:
        reason, number = found.refused.most_common(1)[0]
        parts.append(
            f"Refused by the engine: {found.refused.total():,}, most often ({number:,}): {printable(reason)}"
        )
    return "\n\n".join(parts) + "\n"


def row_cells(row: Row) -> list[str]:
    """Of a table with `HEAD`."""
    config, seconds = row.plan.config, row.seconds
    point = row.point
    order = "-"
    if point.pipe > 1:
        order = f"{point.schedule}{f' x {point.chunks}' if point.chunks else ''}"
    return [
        row.name,
        str(config.zero_optimization.stage),
        f"{config.train_micro_batch_size_per_gpu} x {config.gradient_accumulation_steps}",
        order,
        size_text(row.device_bytes),
        f"{seconds.total:.4g} s",
        f"{seconds.tokens_per_second:,.0f}",
        f"{seconds.utilisation:.0%}",
        ", ".join(gives_up(row)) or "nothing",
    ]


def gives_up(row: Row) -> Iterator[str]:
    """What a row pays for its memory and speed."""
    config = row.plan.config
    zero = config.zero_optimization
    if config.activation_checkpointing.enabled:
        yield "blocks are recomputed"
    if zero.offload_optimizer.device != "none":
        ratio = zero.offload_optimizer.ratio
        share = f"{ratio:.0%} of the " if isinstance(ratio, float) and ratio < 1 else ""
        yield f"{share}updates on the host"
    if zero.offload_param.device != "none":
        yield "parameters on the host"
    if row.is_lossy:
        yield "gradients of 4 bits"
    if zero.zero_quantized_weights:
        yield "gathers of 8 bits"
    if zero.zero_hpz_partition_size > 1:
        yield "memory for second shards"
    if zero.mics_shard_size > 1:
        yield f"memory: a copy for {zero.mics_shard_size} ranks"
    bubble = row.seconds.parts.get("bubble", 0.0) / row.seconds.total
    if bubble >= 0.01:
        yield f"bubble {bubble:.0%}"


def _parts(row: Row) -> str:
    shares = ", ".join(
        f"{part} {row.seconds.parts[part] / row.seconds.total:.1%}"
        for part in PARTS
        if row.seconds.parts.get(part, 0.0) >= 0.0005 * row.seconds.total
    )
    return (
        f"1 takes {row.seconds.total:.4g} s +- {row.seconds.error:.0%}: {shares}\n"
        f"  {row.seconds.bound}"
    )


def _why_lost(best: Row, other: Row) -> str:
    """The part of the step in which the second row takes longest against the first."""
    samples = [row.plan.config.train_batch_size for row in (best, other)]
    slower = other.sample_seconds / best.sample_seconds - 1
    gaps = {
        part: other.seconds.parts.get(part, 0.0) / samples[1]
        - best.seconds.parts.get(part, 0.0) / samples[0]
        for part in PARTS
    }
    part = max(gaps, key=gaps.__getitem__)
    if slower < 1e-6:
        return f"2 ({other.name}) is as fast as 1."
    return (
        f"2 ({other.name}, stage {other.point.stage}) takes {slower:.1%} longer for a sample, most of it "
        f"{part}: {other.seconds.parts.get(part, 0.0):.4g} s of a step against "
        f"{best.seconds.parts.get(part, 0.0):.4g} s."
    )


def goodput_text(options: argparse.Namespace) -> str:
    """How often to save, and the share of time that trains."""
    between = options.gpu_hours_between_failures * 3600 / options.world_size
    found = goodput_of(between, options.save_seconds, options.restart_seconds)
    return (
        f"A failure every {between / 3600:.2f} h: save every {found.interval_seconds / 60:.1f} minutes. "
        f"{found.useful:.1%} of the time trains; saves take {found.saving:.1%}, restarts "
        f"{found.restarting:.1%}, repeated steps {found.repeating:.1%}."
    )


__all__ = ["HEAD", "gives_up", "goodput_text", "row_cells", "rows_text"]
