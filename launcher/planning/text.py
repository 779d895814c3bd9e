"""A plan as text: tables of layers, bytes and messages, the schedule in time, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...engine.planning.machine import Machine
from ...engine.planning.objects import STATE_KINDS, Link
from ...engine.planning.plan import Plan, RankPlan
from ...engine.planning.seconds import PARTS, StepSeconds
from ...engine.planning.timeline import Timeline
from ...ops.mesh import AXES
from ...pipe.schedules.actions import COMPUTE, Op
from ...utils.sizes import size_text

Row = tuple[str, list[str]]  # whose, and the cells
MOST_NAMES = 4  # of modules outside of the blocks
NOTHING = "-"
WIDTH = 100  # characters of a schedule
LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.INPUT: "I", Op.WEIGHT: "W"}
MESSAGES = {
    "reduce_scatter": "gradients reduced",
    "all_gather": "parameters gathered",
    "activations": "pipeline activations",
    "gradients": "pipeline gradients",
    "float8 parameters": "parameters gathered in 8 bits",
    "tensor sums": "tensor sums",
    "tensor gathers": "tensor gathers",
    "experts": "tokens of experts",
}


def plan_text(plan: Plan) -> str:
    """All tables of `plan`."""
    host = counted(plan.ranks_per_host, "rank")
    near = _messages(plan, lambda link: link.inside)
    far = _messages(plan, lambda link: link.between)
    parts = [
        _head(plan),
        "Who has what\n" + table_text(["ranks", "layers", "slices", "parameters"], _layers(plan)),
        "Bytes that a rank holds\n" + table_text(*_states(plan)) + _about_gathered(plan),
    ]
    for title, table in (
        (f"Bytes that a rank sends in a step to ranks of its host, of {host}", near),
        ("Bytes that a rank sends in a step to other hosts", far),
    ):
        if any(cells[-1] != NOTHING for _, cells in table[1]):
            parts.append(title + "\n" + table_text(*table))
    if plan.timeline is not None:
        parts.append(_schedule(plan, plan.timeline))
    if plan.notes:
        parts.append("Notes\n" + "\n".join(f"  {note}" for note in plan.notes))
    return "\n\n".join(parts) + "\n"


def product_text(plan: Plan) -> str:
    """The axes with more than one rank, such as "8 pipe x 128 data x 16 tensor = 16384 ranks"."""
    lengths = dict(zip(AXES, plan.mesh.shape, strict=True))
    used = [f"{length} {axis}" for axis, length in lengths.items() if length > 1] or ["1 data"]
    return f"{' x '.join(used)} = {counted(plan.mesh.size, 'rank')}"


def counted(number: int, what: str) -> str:
    """Such as "1 rank" and "2 ranks"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _head(plan: Plan) -> str:
    config = plan.config
    ranks = plan.mesh.experts
    experts = f"\n  {ranks} neighbouring ranks share the experts of a layer" if ranks > 1 else ""
    precision = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    return (
        f"{plan.name}: {plan.num_parameters:,} parameters on {product_text(plan)}\n"
        f"  ZeRO stage {config.zero_optimization.stage}, {precision}, "
        f"{config.gradient_accumulation_steps} x {counted(config.train_micro_batch_size_per_gpu, 'sample')} in "
        f"a step of each data rank, {counted(config.train_batch_size, 'sample')} in all{experts}"
    )


def place_text(plan: Plan, stages: Sequence[int], tensors: Sequence[int]) -> str:
    """Pipeline stages and tensor coordinates, such as "stage 0-3, tensor 0-15"."""
    parts = []
    if plan.mesh.pipe > 1:
        parts.append(f"stage {_range(stages)}")
    if plan.mesh.tensor > 1:
        parts.append(f"tensor {_range(tensors)}")
    return ", ".join(parts) or "every rank"


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and last - first == len(numbers) - 1:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def _layers(plan: Plan) -> list[Row]:
    rows = []
    for each in plan.ranks:
        share = each.share
        number = len(share.tensors) * plan.mesh.data * plan.mesh.sequence
        blocks = [_blocks(names) for names in share.blocks.values() if names]
        blocks += share.outside[:MOST_NAMES] + ("...",) * (len(share.outside) > MOST_NAMES)
        sliced = str(share.num_sliced) if plan.mesh.tensor > 1 else "-"
        cells = [f"{number:,}", ", ".join(blocks) or "none", sliced, f"{share.numel:,}"]
        rows.append((place_text(plan, [share.pipe], share.tensors), cells))
    return rows


def _blocks(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} to {names[-1].rpartition('.')[2]} ({len(names)})"


def _states(plan: Plan) -> tuple[list[str], list[Row]]:
    kinds = [kind for kind in STATE_KINDS if any(each.states.get(kind) for each in plan.ranks)]
    is_known = any(each.activations is not None for each in plan.ranks)
    away = [kind for kind in kinds if kind in ("host", "disk", "outer")]

    def cells(each: RankPlan) -> list[str]:
        row = [size_text(each.states.get(kind, 0)) for kind in kinds]
        row.append(size_text(sum(each.states.values())))
        if is_known:
            row += [size_text(each.activations or 0), size_text(each.total_bytes)]
        if away:
            row.append(size_text(each.total_bytes - sum(each.states.get(kind, 0) for kind in away)))
        return row

    more = ["activations", "both"] * is_known + ["on the device"] * bool(away)
    return [*kinds, "states", *more], _merged(plan, cells)


def _about_gathered(plan: Plan) -> str:
    """A line about the column `gathered`, by which stage 3 can need more than stage 2; "" without it."""
    threshold = plan.config.zero_optimization.param_persistence_threshold
    if not threshold or not any(each.states.get("gathered") for each in plan.ranks):
        return ""
    return (
        f"\n  gathered: units of at most {threshold:,} elements stay whole beside their shards, so a small "
        "model can need\n  more bytes than at stage 2; zero_optimization.param_persistence_threshold = 0 frees "
        "them after use"
    )


def _messages(plan: Plan, part: Callable[[Link], int]) -> tuple[list[str], list[Row]]:
    found = {kind for each in plan.ranks for kind, link in each.sent.items() if link.total}
    kinds = [kind for kind in MESSAGES if kind in found] + sorted(found.difference(MESSAGES))

    def cells(each: RankPlan) -> list[str]:
        sizes = [part(each.sent.get(kind, Link())) for kind in kinds]
        return [size_text(size) if size else NOTHING for size in [*sizes, sum(sizes)]]

    return [*(MESSAGES.get(kind, kind) for kind in kinds), "all"], _merged(plan, cells)


def _merged(plan: Plan, cells_of: Callable[[RankPlan], list[str]]) -> list[Row]:
    """A row for each share; neighbouring stages with equal cells have one together."""
    found: list[tuple[list[int], tuple[int, ...], list[str]]] = []
    for each in plan.ranks:
        cells, stage, tensors = cells_of(each), each.share.pipe, each.share.tensors
        alike = [row for row in found if row[0][-1] == stage - 1 and row[1:] == (tensors, cells)]
        if alike:
            alike[0][0].append(stage)
        else:
            found.append(([stage], tensors, cells))
    return [(place_text(plan, stages, tensors), cells) for stages, tensors, cells in found]


def table_text(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Columns under `head`; each row has a name and its cells."""
    lines = [["", *head], *([name, *cells] for name, cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for name, *cells in lines:
        aligned = [text.rjust(width) for text, width in zip(cells, widths[1:], strict=True)]
        texts.append("  " + "  ".join([name.ljust(widths[0]), *aligned]))
    return "\n".join(texts)


def _schedule(plan: Plan, line: Timeline) -> str:
    placement = line.table.placement
    chunks = f" of {placement.num_chunks} chunks" if placement.num_chunks > 1 else ""
    head = (
        f"Schedule {plan.config.pipeline.schedule}: {placement.num_ranks} stages{chunks}, "
        f"{line.table.num_micro_batches} micro-batches. F forward, B backward, I and W its two parts, . waits"
    )
    rows = [f"  stage {rank:<3} {row}" for rank, row in enumerate(_drawn(line))]
    bubble = (
        f"  bubble {line.bubble:.1%} of the step, if times are as the counted multiplications; "
        f"{line.equal_bubble:.1%} if all stages are equally fast"
    )
    return "\n".join([head, *rows, bubble])


def _drawn(line: Timeline) -> list[str]:
    """One line for each pipeline rank: the letter of what it computes most of in each part of the step."""
    run, end = line.run, line.run.makespan_seconds
    found = []
    for rank, actions in enumerate(line.table.rows):
        row = ["."] * WIDTH
        for action, start, stop in zip(actions, run.starts[rank], run.ends[rank], strict=True):
            if action.op in COMPUTE:
                first, last = round(start / end * WIDTH), round(stop / end * WIDTH)
                row[first:last] = LETTERS[action.op] * (last - first)
        found.append("".join(row))
    return found


# -- seconds ------------------------------------------------------------------------------------------------


def seconds_text(step: StepSeconds, machine: Machine, plan: Plan) -> str:
    """A table of the parts, one of the messages, and what follows from them."""
    rows = [
        (part, [_duration(step.parts[part]), f"{step.parts[part] / step.total:.1%}"])
        for part in PARTS
        if step.parts[part]
    ]
    rows.append(("all", [f"{_duration(step.total)} +- {step.error:.0%}", "100.0%"]))
    text = f"Seconds of a step on {machine.name}\n" + table_text(["time", "share"], rows)
    kinds = [kind for kind in {**step.exposed, **step.hidden} if step.exposed.get(kind, 0) > 0]
    kinds += [kind for kind, seconds in step.hidden.items() if seconds > 0 and kind not in kinds]
    if kinds:
        messages = [
            (
                MESSAGES.get(kind, kind),
                [_duration(step.exposed.get(kind, 0.0)), _duration(step.hidden.get(kind, 0.0))],
            )
            for kind in kinds
        ]
        text += "\n\nMessages of a step\n" + table_text(
            ["waited for", "beside computation"], messages
        )
    speed = step.tokens_per_second
    return (
        f"{text}\n\n"
        f"  {speed:,.0f} tokens/s, {speed / plan.mesh.size:,.0f} of each of {counted(plan.mesh.size, 'rank')}; "
        f"model FLOP utilisation {step.utilisation:.1%}\n"
        f"  {step.bound}\n"
    )


def _duration(seconds: float) -> str:
    """Such as "1.234 s" and "5.6 ms".

    >>> _duration(1.2344), _duration(0.0056), _duration(0)
    ('1.234 s', '5.60 ms', '-')
    """
    if not seconds:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


__all__ = [
    "counted",
    "place_text",
    "plan_text",
    "product_text",
    "seconds_text",
    "table_text",
]
