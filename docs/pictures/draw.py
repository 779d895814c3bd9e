"""Draws every picture of the documentation: `python docs/pictures/draw.py` writes the SVG files beside it.

What a picture shows comes from the engine: bytes from the planner, schedules from `xds.pipe`, ranks from the
mesh. Step times are those of benchmarks/README.md. `tests/test_pictures.py` fails where a file is older than
what it shows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
from drawing import Picture  # noqa: E402

WIDTH = 760

# -- what each ZeRO stage keeps -----------------------------------------------------------------------------

RANKS = 8
STATES = (  # kinds of the planner, name, fill, bytes of an element
    (("param",), "parameters", "blue", 2),
    (("grad",), "gradients", "orange", 4),
    (("master", "optimizer"), "optimizer", "green", 10),
)


@cache
def planned_bytes(stage: int) -> dict[str, int]:
    """Bytes by kind of `xds plan` that each of 8 ranks keeps of a 7B model with AdamW in bf16."""
    from torch import nn

    from xds.engine.config.config import parse_config
    from xds.engine.planning.models import ModelSource
    from xds.engine.planning.plan import make_plan

    class Block(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            self.mlp = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, width, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    class Source(ModelSource):
        """The shapes of Llama 2 7B: 6.74e9 parameters."""

        name = "7B"

        def build(self) -> nn.Module:
            ends = [nn.Embedding(32000, 4096), nn.Linear(4096, 32000, bias=False)]
            blocks = nn.ModuleList(Block(4096, 11008) for _ in range(32))
            return nn.ModuleList([ends[0], blocks, nn.RMSNorm(4096), ends[1]])

        def batch(self, micro_batch_size: int) -> None:
            return None

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,  # with one, 16 bits of a local gradient suffice
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    plan = make_plan(Source(), parse_config(config), RANKS, RANKS)
    (rank,) = plan.ranks
    return dict(rank.states)


def zero_stages() -> Picture:
    """A panel for each stage: its columns are ranks, its rows the states that they keep."""
    picture = Picture(WIDTH, 398, "What each of 8 ranks keeps at ZeRO stages 0 to 3")
    picture.text(20, 32, "What each of 8 ranks keeps", size=18, bold=True)
    picture.text(
        WIDTH - 20,
        32,
        "7B parameters in bf16, AdamW, gradients summed in fp32",
        ink="muted",
        anchor="end",
    )
    column, gap, panel, top, scale = 16.0, 3.0, 190.0, 54.0, 11.0
    for stage in range(4):
        found, x0 = planned_bytes(stage), 20 + stage * panel
        picture.text(x0, top + 16, f"stage {stage}", size=15, bold=True)
        total = f"{sum(found.values()) / 1e9:.1f} GB"
        picture.text(x0 + 149, top + 16, total, size=15, bold=True, anchor="end")
        y = top + 28
        for number, (kinds, name, fill, element_bytes) in enumerate(STATES):
            height = max(scale * element_bytes, 32.0)
            is_cut = stage >= 3 - number
            for rank in range(RANKS):
                x, part = x0 + rank * (column + gap), height / RANKS
                picture.box(x, y, column, height, "empty" if is_cut else fill, radius=2)
                if is_cut:
                    picture.box(x, y + rank * part, column, part, fill, radius=1)
            y += height + 8
            line = 332 + 22 * number
            picture.box(x0, line - 10, 11, 11, fill, radius=2)
            picture.text(x0 + 16, line, name, size=13, ink="muted")
            size = f"{sum(found[kind] for kind in kinds) / 1e9:.1f}"
            picture.text(x0 + 149, line, size, size=13, anchor="end")
    return picture


# -- the house ------------------------------------------------------------------------------------------------

FLOORS = (  # from the top; a room is a folder and what it does
    (("launcher", "starts the ranks, watches them, reports the first failure"),),
    (("engine", "config, training step, checkpoints; deepspeed: DeepSpeed's names over it"),),
    (
        ("zero", "shards states"),
        ("pipe", "cuts stages"),
        ("tensor", "cuts layers"),
        ("experts", "sends tokens"),
        ("recovery", "lost ranks"),
        ("outer", "joins sites"),
    ),
    (("offload", "states in host memory, on disks"), ("compression", "messages of fewer bits")),
    (("ops", "collectives, flat optimizers, native kernels, the watcher"),),
    (("utils", "errors, typed config sections, files"),),
)


def house() -> Picture:
    """The folders of the package, one floor above the other."""
    floor, gap, left, right, top = 56.0, 6.0, 60.0, 640.0, 108.0
    picture = Picture(WIDTH, 506, "The folders of xds: each imports only folders below it")
    middle = (left + right) / 2
    roof = [(left - 14, top - gap), (middle, 16.0), (right + 14, top - gap)]
    picture.shape(roof, "empty")
    picture.text(middle, 68, "your training loop", size=16, bold=True, anchor="middle")
    picture.text(middle, 90, "xds.initialize", code=True, ink="muted", anchor="middle")
    fills = ("purple", "blue", "blue", "green", "orange", "orange")
    for number, (rooms, fill) in enumerate(zip(FLOORS, fills, strict=True)):
        y, width = top + number * (floor + gap), (right - left + gap) / len(rooms) - gap
        edge = 14 if len(rooms) < 6 else 8
        for place, (name, words) in enumerate(rooms):
            x = left + place * (width + gap)
            picture.box(x, y, width, floor, fill, radius=4)
            picture.text(x + edge, y + 24, name, size=15, bold=True, code=True, ink="white")
            picture.text(x + edge, y + 43, words, size=13, ink="white")
    bottom = top + len(FLOORS) * (floor + gap)
    picture.line((682, top), (682, bottom - gap), arrow=True)
    picture.text(WIDTH - 16, (top + bottom) / 2 - 8, "imports", ink="muted", anchor="end")
    picture.text(WIDTH - 16, (top + bottom) / 2 + 10, "go down", ink="muted", anchor="end")
    return_line = "Rooms of one floor never import each other."
    picture.text(left, bottom + 16, return_line, size=13, ink="muted")
    return picture


# -- the path of a gradient -----------------------------------------------------------------------------------

WAY = (  # the row of the page, what happens, the classes, what each rank has: a shape, its fill
    ("G2", "backward fills .grad", "BackwardPass", "pieces", "orange"),
    ("G4", "copied into one flat buffer", "GradBucket", "whole", "orange"),
    ("G6", "reduce_scatter: the sum of one shard", "Reduction, Collectives", "shard", "orange"),
    ("G8", "the norm: one small message", "StepStatus", "message", "purple"),
    ("G11", "clip, update the master, cast", "Updater, Master, Adam", "shard", "green"),
    ("G12", "all_gather: new parameters", "ParamBucket", "whole", "blue"),
)


def gradient() -> Picture:
    """A row for each step at stage 2: its words, and the buffer of each of 4 ranks."""
    ranks, bar, gap, x0, top, row = 4, 84.0, 12.0, 360.0, 92.0, 58.0
    picture = Picture(WIDTH, top + row * len(WAY) - 6, "The path of a gradient at ZeRO stage 2")
    picture.text(20, 32, "The path of a gradient, stage 2", size=18, bold=True)
    centers = [x0 + rank * (bar + gap) + bar / 2 for rank in range(ranks)]
    for rank, center in enumerate(centers):
        picture.text(center, 66, f"rank {rank}", size=13, ink="muted", anchor="middle")
    for number, (step, words, classes, kind, fill) in enumerate(WAY):
        y = top + number * row
        picture.text(60, y + 8, words, size=15)
        picture.text(60, y + 27, classes, size=13, ink="muted", code=True)
        picture.text(20, y + 8, step, size=15, bold=True, ink="muted")
        if kind == "message":
            picture.line((centers[0], y + 8), (centers[-1], y + 8))
        for rank, center in enumerate(centers):
            if number:
                start = y - row + (17 if WAY[number - 1][3] == "message" else 24)
                picture.line(
                    (center, start), (center, y - (3 if kind == "message" else 9)), arrow=True
                )
            _buffer(picture, center - bar / 2, y - 6, bar, rank, ranks, kind, fill)
    return picture


def _buffer(  # noqa: PLR0913
    picture: Picture, x: float, y: float, bar: float, rank: int, ranks: int, kind: str, fill: str
) -> None:
    part = bar / ranks
    if kind == "pieces":
        for start, end in ((0, 0.3), (0.34, 0.46), (0.5, 0.78), (0.82, 1)):
            picture.box(x + start * bar, y, (end - start) * bar, 28, fill)
    elif kind == "message":
        picture.box(x + bar / 2 - 8, y + 6, 16, 16, fill, radius=8)
    else:
        picture.box(x, y, bar, 28, fill if kind == "whole" else "empty")
        if kind == "shard":
            picture.box(x + rank * part, y, part, 28, fill)


# -- schedules of a pipeline ----------------------------------------------------------------------------------

SHOWN = {"1f1b": "1F1B", "zero_bubble": "zero bubble (ZB-H1)"}
STAGES, MICRO_BATCHES = 4, 8


def pipeline_schedules() -> Picture:
    """The step of two schedules on the same time scale: a row for each stage."""
    from xds.pipe.schedules.actions import COMPUTE, Op
    from xds.pipe.schedules.build import build_table
    from xds.pipe.schedules.simulation import Costs, simulate

    fills = {Op.FORWARD: "blue", Op.BACKWARD: "orange", Op.INPUT: "orange", Op.WEIGHT: "green"}
    picture = Picture(WIDTH, 428, "A pipeline's step by 1F1B and without most of its bubble")
    scale, row, x0, panel = 19.6, 30.0, 86.0, 178.0
    for number, (schedule, title) in enumerate(SHOWN.items()):
        run = simulate(build_table(schedule, STAGES, MICRO_BATCHES), Costs(1, 1, 1))
        top = 24 + number * panel
        picture.text(20, top + 12, title, size=16, bold=True)
        waits = f"a stage waits {run.bubble:.0%} of the step"
        picture.text(WIDTH - 20, top + 12, waits, ink="muted", anchor="end")
        for rank, actions in enumerate(run.table.rows):
            y = top + 26 + rank * (row + 4)
            picture.text(20, y + 20, f"stage {rank}", size=13, ink="muted")
            picture.box(x0, y, run.makespan_seconds * scale, row, "empty", radius=0)
            for action, start, end in zip(actions, run.starts[rank], run.ends[rank], strict=True):
                if action.op in COMPUTE:
                    x, width = x0 + start * scale, (end - start) * scale
                    picture.box(x + 0.5, y + 0.5, width - 1, row - 1, fills[action.op], radius=2)
                    name = str(action.micro_batch)
                    picture.text(x + width / 2, y + 20, name, size=13, ink="white", anchor="middle")
    names = ("forward", "backward, or its gradient of inputs", "gradient of weights", "waits")
    entries = list(zip(("blue", "orange", "green", "empty"), names, strict=True))
    picture.legend(20, 392, entries)
    note = "Numbers are micro-batches. Each part of a backward takes as long as a forward."
    picture.text(20, 415, note, size=13, ink="muted")
    return picture


# -- ranks in three dimensions --------------------------------------------------------------------------------


def ranks_3d() -> Picture:
    """8 ranks as 2 stages x 2 data ranks x 2 tensor ranks, and what travels along each axis."""
    from xds.ops.mesh import Mesh

    mesh = Mesh(pipe=2, data=2, tensor=2)
    cell_width, cell, x_stages, top = 122.0, 76.0, (20.0, 408.0), 52.0
    picture = Picture(WIDTH, 404, "8 ranks as 2 pipeline stages, 2 data ranks and 2 tensor ranks")
    for pipe, x0 in enumerate(x_stages):
        picture.box(x0, top, 332, 242, "empty", radius=6)
        layers = ("first", "second")[pipe]
        picture.text(x0, 34, f"stage {pipe}", size=16, bold=True)
        picture.text(x0 + 332, 34, f"the {layers} half of the layers", ink="muted", anchor="end")
        for data in range(mesh.data):
            y = top + 20 + data * 126
            for tensor in range(mesh.tensor):
                x = x0 + 20 + tensor * 170
                rank = mesh.rank_at(pipe=pipe, data=data, tensor=tensor)
                picture.box(x, y, cell_width, cell, "blue" if pipe == 0 else "purple", radius=5)
                center = x + cell_width / 2
                label = f"rank {rank}"
                picture.text(
                    center, y + 32, label, size=16, bold=True, anchor="middle", ink="white"
                )
                words = f"batch {data}, slice {tensor}"
                picture.text(center, y + 54, words, size=13, anchor="middle", ink="white")
            right = x0 + 20 + cell_width
            picture.box(right + 2, y + cell / 2 - 5, 44, 10, "green", radius=5)
        for tensor in range(mesh.tensor):
            x = x0 + 20 + tensor * 170 + cell_width / 2
            picture.box(x - 5, top + 20 + cell + 2, 10, 46, "orange", radius=5)
    for data in range(mesh.data):
        y = top + 20 + data * 126 + cell / 2
        picture.line((342, y), (400, y), arrow=True)
    axes = (
        ("green", "tensor", "sums of activations: two in forward and two in backward of a block"),
        ("orange", "data", "gradients and parameters of the ZeRO stage"),
        ("", "pipe", "activations of a micro-batch, and back their gradients"),
    )
    for number, (fill, axis, words) in enumerate(axes):
        y = 326 + number * 26
        if fill:
            picture.box(20, y - 10, 34, 10, fill, radius=5)
        else:
            picture.line((20, y - 5), (52, y - 5), arrow=True)
        picture.text(68, y, axis, size=15, bold=True)
        picture.text(136, y, words, ink="muted")
    return picture


# -- offload --------------------------------------------------------------------------------------------------

UNITS = 4
FORWARD, BACKWARD, UPDATE, COPY = 1.0, 2.0, 1.5, 0.5  # of one unit
LANES = ("device", "to host", "host", "to device")


class Event(NamedTuple):
    """Something that keeps a lane busy, for one unit of the model."""

    lane: str
    start: float
    end: float
    fill: str
    unit: int


class Timing:
    """Steps of a small model whose optimizer is on the host, by the rules of docs/design/offload.md."""

    def __init__(self, *, waits: bool, early: bool) -> None:
        """waits: `step()` returns when the device has all new values. early: updates run in backward."""
        self.events: list[Event] = []
        self.steps: list[float] = []  # where each begins
        self._waits, self._early = waits, early
        self._free = dict.fromkeys(LANES, 0.0)

    def run(self, num_steps: int) -> Timing:
        ready = [0.0] * UNITS  # when the device has the new values
        for _ in range(num_steps):
            for unit in range(UNITS):
                start = self._add("device", ready[unit], FORWARD, "blue", unit) - FORWARD
                if unit == 0:
                    self.steps.append(start)
            arrived = {}
            for unit in reversed(range(UNITS)):
                end = self._add("device", 0.0, BACKWARD, "orange", unit)
                arrived[unit] = self._add("to host", end, COPY, "orange", unit)
            known = max(arrived.values())  # the norm
            updated = dict(self._early_updates(arrived, known)) if self._early else {}
            for unit in range(UNITS):
                if unit not in updated:
                    updated[unit] = self._add("host", known, UPDATE, "green", unit)
            for unit in sorted(updated, key=lambda unit: (max(updated[unit], known), unit)):
                ready[unit] = self._add("to device", max(updated[unit], known), COPY, "blue", unit)
            if self._waits:
                ready = [max(ready)] * UNITS
        return self

    def _early_updates(
        self, arrived: dict[int, float], known: float
    ) -> Iterator[tuple[int, float]]:
        """What begins before the norm is known: always the unit that came last."""
        left = dict(arrived)
        while left:
            now = max(self._free["host"], min(left.values()))
            if now >= known:
                return
            unit = max((unit for unit in left if left[unit] <= now), key=lambda unit: left[unit])
            del left[unit]
            yield unit, self._add("host", now, UPDATE, "green", unit)

    def _add(self, lane: str, start: float, duration: float, fill: str, unit: int) -> float:
        start = max(start, self._free[lane])
        self._free[lane] = end = start + duration
        self.events.append(Event(lane, start, end, fill, unit))
        return end


def offload_overlap() -> Picture:
    """One step of each way to overlap updates, on the same time scale."""
    ways = (
        ("default, stages 0 to 2: updates in step()", {"waits": True, "early": False}),
        (
            "overlap_step, and stage 3: updates under the next forward",
            {"waits": False, "early": False},
        ),
        ("super_offload: updates in backward already", {"waits": False, "early": True}),
    )
    picture = Picture(WIDTH, 530, "When updates on the host run, and how long a step takes")
    scale, row, x0, shown = 27.0, 22.0, 96.0, 24.0
    longest = 0.0
    for number, (title, how) in enumerate(ways):
        timing, top = Timing(**how).run(4), 22 + number * 156
        begin, end = timing.steps[-2:]
        longest = longest or end - begin
        picture.text(20, top + 12, title, size=15, bold=True)
        share = f"a step takes {(end - begin) / longest:.0%}" + " of that" * bool(number)
        picture.text(WIDTH - 20, top + 12, share, ink="muted", anchor="end")
        for place, lane in enumerate(LANES):
            y = top + 24 + place * (row + 4)
            picture.text(20, y + 16, lane, size=13, ink="muted")
            picture.box(x0, y, shown * scale, row, "empty", radius=0)
            for event in timing.events:
                first, last = max(event.start, begin), min(event.end, begin + shown)
                if event.lane != lane or last - first < 0.01:
                    continue
                x, width, later = x0 + (first - begin) * scale, (last - first) * scale, first >= end
                picture.box(x + 0.5, y + 0.5, width - 1, row - 1, event.fill, radius=2, faint=later)
                if last - first >= 1:
                    at, name = x + width / 2, str(event.unit)
                    ink = "text" if later else "white"
                    picture.text(at, y + 16, name, size=12.5, ink=ink, anchor="middle")
        x = x0 + (end - begin) * scale
        picture.line((x, top + 18), (x, top + 24 + len(LANES) * (row + 4)), dashed=True)
    fills = ("blue", "orange", "green")
    names = ("forward, new parameters", "backward, gradients", "updates on the host")
    picture.legend(20, 496, list(zip(fills, names, strict=True)))
    note = (
        "Numbers are units of the model. The order is the engine's, the durations are an example."
    )
    picture.text(20, 518, note, size=13, ink="muted")
    return picture


# -- step time ------------------------------------------------------------------------------------------------

PEERS = ("DDP", "FSDP2", "DeepSpeed")
MODEL = "40M fp32"


def step_times() -> list[tuple[str, int, dict[int, float]]]:
    """Peer, stage, and by tokens of a rank xds's step time over the peer's, from benchmarks/README.md."""
    text = (HERE.parents[1] / "benchmarks" / "README.md").read_text()
    table = text.partition("## Step time")[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    columns = {tokens: rows[0].index(f"{MODEL}, {tokens}") for tokens in (64, 256)}
    found = []
    for row in rows:
        named = re.fullmatch(r"stage (\d) against (\w+)", row[0])
        if named:
            values = {tokens: float(row[at].split(",")[0]) for tokens, at in columns.items()}
            found.append((named[2], int(named[1]), values))
    return sorted(found, key=lambda row: (PEERS.index(row[0]), row[1]))


def step_time() -> Picture:
    """A bar for each peer and stage: the step of xds, where the peer's is 1."""
    rows = step_times()
    bar, x0, whole, top = 17.0, 190.0, 500.0, 66.0
    height = top + len(rows) * 26 + (len(PEERS) - 1) * 8 + 58
    picture = Picture(WIDTH, height, "Step time of xds over that of DDP, FSDP2 and DeepSpeed")
    picture.text(20, 32, "Step time of xds over that of its peers", size=18, bold=True)
    picture.text(WIDTH - 20, 32, "shorter is faster", ink="muted", anchor="end")
    y, before = top, ""
    for peer, stage, values in rows:
        if peer != before:
            y += 8 * bool(before)
            picture.text(20, y + 14, peer, size=15, bold=True)
        picture.text(x0 - 10, y + 14, f"stage {stage}", size=13, ink="muted", anchor="end")
        picture.box(x0, y, whole, bar, "empty", radius=2)
        picture.box(x0, y, values[256] * whole, bar, "blue", radius=2, faint=True)
        picture.box(x0, y, values[64] * whole, bar, "blue", radius=2)
        few, many = x0 + values[64] * whole - 6, x0 + values[256] * whole + 6
        picture.text(few, y + 13.5, f"{values[64]:.2f}", size=13, ink="white", anchor="end")
        picture.text(many, y + 13.5, f"{values[256]:.2f}", size=13)
        y, before = y + 26, peer
    picture.line((x0 + whole, top - 6), (x0 + whole, y - 4), dashed=True)
    picture.text(x0 + whole, top - 12, "the peer's step", size=13, ink="muted", anchor="middle")
    picture.box(20, y + 8, 12, 12, "blue", radius=2)
    picture.text(38, y + 18, "64 tokens a rank", size=13, ink="muted")
    picture.box(170, y + 8, 12, 12, "blue", radius=2, faint=True)
    picture.text(188, y + 18, "256 tokens a rank", size=13, ink="muted")
    where = "GPT of 40M parameters, fp32, 2 ranks on 2 CPU cores, medians of 5 rounds"
    picture.text(20, y + 41, where, size=13, ink="muted")
    return picture


# -- sparse layouts -------------------------------------------------------------------------------------------

LAYOUTS = (  # class, arguments, what it is
    ("Fixed", {}, "windows; their last block for all"),
    ("Fixed", {"attention": "unidirectional"}, "the same, unidirectional"),
    (
        "Variable",
        {"local_window_blocks": [1, 3, 4], "num_random_blocks": 1},
        "given windows, random blocks",
    ),
    ("BigBird", {}, "a band, block 0, random blocks"),
    ("BSLongformer", {"global_block_indices": [0, 8]}, "a band, given blocks"),
    ("LocalSlidingWindow", {"num_sliding_window_blocks": 5}, "a band, unidirectional"),
)


def sparse_layouts() -> Picture:
    """A grid for each rule: its rows are blocks of queries, its columns blocks of keys."""
    import random

    from xds.ops import sparse_attention

    blocks, cell, column, row_height = 16, 11.0, 246.0, 256.0
    picture = Picture(WIDTH, 568, "The blocks that each block of queries sees, by layout")
    picture.text(20, 32, "Which blocks of keys each block of queries sees", size=18, bold=True)
    picture.legend(
        20, 58, [("blue", "seen"), ("orange", "seen, cut inside the block"), ("empty", "not seen")]
    )
    for number, (name, more, what) in enumerate(LAYOUTS):
        made = getattr(sparse_attention, name)(1, 1, **more)
        layout = made.make_layout(blocks, rng=random.Random(4))[0].tolist()
        x0, y0 = 20 + number % 3 * column, 92 + number // 3 * row_height
        picture.text(x0, y0, name, size=15, bold=True, code=True)
        picture.text(x0, y0 + 18, what, size=13, ink="muted")
        is_causal = made.attention == "unidirectional"
        for row in range(blocks):
            for col in range(blocks):
                seen = layout[row][col] and not (is_causal and col > row)
                fill = "empty" if not seen else "orange" if is_causal and row == col else "blue"
                picture.box(
                    x0 + col * cell, y0 + 28 + row * cell, cell - 1, cell - 1, fill, radius=1
                )
    return picture


# -- compressed models --------------------------------------------------------------------------------------


def compressed_models() -> list[tuple[str, float, int]]:
    """(name, mean accuracy in percent, bytes of the file), of the table in docs/compressed-training.md."""
    found = []
    for line in (HERE.parent / "compressed-training.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"[\d,]+", cells[3]):
            values = [float(one) for one in cells[2].split(",")]
            found.append((cells[0], sum(values) / len(values), int(cells[3].replace(",", ""))))
    return found


def compressed_sizes() -> Picture:
    """A bar for each model: the bytes of its file, with the accuracy beside it."""
    models, x0, whole, top = compressed_models(), 230.0, 330.0, 62.0
    height = top + len(models) * 34 + 34
    picture = Picture(
        WIDTH, height, "File size and accuracy of a classifier, compressed in four ways"
    )
    picture.text(20, 32, "A classifier of digits, compressed in four ways", size=18, bold=True)
    picture.text(WIDTH - 20, 32, "accuracy, mean of 3 seeds", ink="muted", anchor="end")
    most = max(size for _, _, size in models)
    for number, (name, accuracy, size) in enumerate(models):
        y, width = top + number * 34, whole * size / most
        picture.text(20, y + 17, name, size=15)
        picture.box(x0, y, whole, 24, "empty", radius=2)
        picture.box(x0, y, width, 24, "blue", radius=2)
        picture.text(x0 + 8, y + 17, f"{size / 1e3:.0f} kB", size=13, ink="white")
        picture.text(WIDTH - 20, y + 17, f"{accuracy:.2f} %", size=15, bold=True, anchor="end")
    note = "digits of scikit-learn, 719 test images; bars are bytes of model.safetensors"
    picture.text(20, height - 14, note, size=13, ink="muted")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    draw.__name__: draw
    for draw in (
        zero_stages,
        house,
        gradient,
        pipeline_schedules,
        ranks_3d,
        offload_overlap,
        step_time,
        sparse_layouts,
        compressed_sizes,
    )
}


def main() -> None:
    """Write all files, or those that are named."""
    for name in sys.argv[1:] or PICTURES:
        (HERE / f"{name}.svg").write_text(PICTURES[name]().svg())
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
