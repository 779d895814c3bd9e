"""Saves a checkpoint: every rank writes its share into a new folder, rank 0 commits it and updates `latest`.

prepare, folder, tag  ->  write, fsync  ->  commit  ->  latest        each step: on all ranks, or all raise
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ...ops.flat import overlap
from ...ops.optim.shard_optimizer import kind_of
from ...ops.weights.tensor_table import check_storable
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.quoting import quoted
from ...zero.checkpoint.ranges import Range
from ...zero.checkpoint.snapshot import Snapshot, StateBlock, name_of
from ..counters import Counters
from ..data.loaders import keeps_position, loader_position
from ..parts import Parts
from .agreement import together
from .format import constants_to_json
from .hyperparameters import check_state_values
from .io.folders import check_folder, check_tag, discard, make_folder
from .io.storage import Claim
from .io.tensor_file import TensorEntry, bytes_of, dense
from .manifest import FileRecord, RankPart
from .packing import pack
from .random_state import read_random_state
from .saver import DOING, SaveJob
from .score import Score, asked_score, score_of

log = logging.getLogger("xds")


@dataclass(frozen=True)
class SaveOptions:
    """How to save; the names are those of `Engine.save_checkpoint`."""

    save_latest: bool = True
    exclude_frozen_parameters: bool = False
    tag_validation: str = "fail"
    score: tuple[Any, Any, Any] = (None, "min", 0)  # metric, mode, keep_best


@final
@dataclass(eq=False)
class Content:
    """The tensors and values that this rank writes."""

    snapshot: Snapshot
    entries: list[TensorEntry] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    state: Any = None
    own: Any = None
    _num_put: int = 0

    def put(self, prefix: str, tensor: Tensor) -> str:
        """Add a tensor that is in no flat buffer, and return its name."""
        name = f"{prefix}/{self._num_put}"  # the same on every rank that puts the same
        self._num_put += 1
        self.entries.append(TensorEntry(name, tensor, 0, tensor.numel()))
        return name

    def add(self, block: StateBlock) -> None:
        """Add this rank's share of a block."""
        check_storable(self.snapshot.flats[block.flat].slots[0].name, block.tensor)
        start, stop = block.start, block.stop
        if not block.is_own:
            start, stop = overlap(self.snapshot.share(block.flat), (start, stop))
        if start == stop:
            return
        name = f"{block.key}/{block.flat}/{start}"
        dtype = name_of(block.tensor.dtype)
        here = (start - block.start, stop - block.start)
        self.entries.append(
            TensorEntry(name, block.tensor, *here, block.blocks, block.reads_memory)
        )
        self.ranges.append(
            Range(block.flat, block.key, start, stop, self.snapshot.rank, name, dtype)
        )

    def part(self) -> RankPart:
        """This rank's part of the manifest, without its file's length and checksums."""
        snapshot = self.snapshot
        record = FileRecord(
            path="",
            size_bytes=0,
            chunk_bytes=0,
            crc32=(),
            ranges=tuple(self.ranges),
            constants=tuple(constants_to_json(snapshot.constants)),
            own=self.own,
        )
        # rank 0 has those of the first part of the model, and gets those of other parts from their first ranks
        sends_flats = any(ranks[0] == snapshot.rank for ranks in snapshot.mesh.parts())
        return RankPart(record, tuple(snapshot.flats) if sends_flats else ())

    def drop(self, flats: Collection[int]) -> None:
        """Remove this rank's ranges of `flats`: other ranks save them."""
        names = {elements.tensor for elements in self.ranges if elements.flat in flats}
        self.ranges = [elements for elements in self.ranges if elements.flat not in flats]
        self.entries = [entry for entry in self.entries if entry.name not in names]


def save_checkpoint(
    parts: Parts,
    counters: Counters,
    save_dir: str | Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    options: SaveOptions,
) -> float | None:
    """See `Engine.save_checkpoint`. Returns the metric on which the ranks agree."""
    collectives, saver = parts.sharded.collectives, parts.saver
    assert saver is not None
    save = _Save(parts, counters, options)
    try:
        # a rank that cannot take a step says so in its message: then all ranks raise
        prepare = partial(save.prepare, save_dir, tag, client_state)
        _, shared = together(collectives, DOING, prepare, save.shared_values)
        save.agree(shared)
    except BaseException:
        save.discard_folder()
        raise
    job = save.job()
    saver.save(job, save.content.entries)
    if job.score is None:
        return None
    counters.count_save(job.score.metric, job.score.mode)
    return job.score.metric


@final
class _Save:
    """One save on this rank. Its steps, in this order:

    prepare        refuses what can be refused, collects the content; rank 0 makes the folder
    shared_values  what each rank tells the others: its tag, the folder, checksums of its buffers
    agree          takes one tag, and divides the buffers among the ranks
    job            what is left to do: see that the folder is there, write the files, and commit
    """

    content: Content
    save_dir: Path

    def __init__(self, parts: Parts, counters: Counters, options: SaveOptions) -> None:
        self._parts = parts
        self._counters = counters
        self._options = options
        self._claim: Claim | None = None  # of the folder, on rank 0, which has made it
        self._tag = ""
        self._asked: list[Any] = []
        self._score: Score | None = None
        self._first_folder = Path()  # as rank 0 sees it

    @property
    def _is_first(self) -> bool:
        return self._parts.sharded.collectives.rank == 0

    def prepare(
        self, save_dir: str | Path, tag: str | None, client_state: Mapping[str, Any] | None
    ) -> None:
        """Raises what the arguments or the state of the engine do not allow. No file is written yet."""
        parts, counters = self._parts, self._counters
        assert parts.saver is not None
        self.save_dir = check_folder("save_dir", save_dir)
        self._tag = check_tag(f"global_step{counters.global_steps}" if tag is None else tag)
        if client_state is not None and not isinstance(client_state, Mapping):
            raise wrong("client_state", client_state, "a dict, or None")
        parts.saver.wait(parts.recovery)
        self._asked = asked_score(*self._options.score)
        self.content = collect(parts, counters, client_state, self._options)
        if self._is_first:
            self._claim = make_folder(self.save_dir, self._tag)

    def shared_values(self, _: None) -> Any:
        folder = str(self._claim.folder.absolute()) if self._claim is not None else ""
        return [self._tag, folder, self._asked, buffer_sums(self.content.snapshot)]

    def agree(self, shared: list[Any]) -> None:
        """`shared`: the values of all ranks, in rank order."""
        tags, folders, asked, sums = zip(*shared, strict=True)
        self._score = score_of(asked)
        self._tag = _agreed_tag(list(tags), self._options.tag_validation, self._is_first)
        self._first_folder = Path(folders[0])
        add_own(self.content, self._parts, self._counters, list(sums))

    def discard_folder(self) -> None:
        """Remove the folder, if this rank has made it."""
        if self._claim is not None:
            discard(self._claim.folder)
            self._claim.release()

    def job(self) -> SaveJob:
        parts = self._parts
        assert parts.saver is not None
        return SaveJob(
            collectives=parts.sharded.collectives,
            rank=parts.sharded.collectives.rank,
            save_dir=self.save_dir,
            first_folder=self._first_folder,
            claim=self._claim,
            tag=self._tag,
            save_latest=self._options.save_latest,
            keep_last=parts.saver.keep_last,
            mesh=self.content.snapshot.mesh,
            stage=parts.config.zero_optimization.stage,
            part=self.content.part(),
            state=self.content.state,
            score=self._score,
        )


def _agreed_tag(tags: list[str], tag_validation: str, is_first: bool) -> str:
    """The tag of rank 0. Raises UsageError: another rank has another, and the config says `fail`."""
    if len(set(tags)) > 1 and tag_validation != "ignore":
        other = next(rank for rank, tag in enumerate(tags) if tag != tags[0])
        text = (
            f"{DOING}: rank 0 saves under the tag {quoted(tags[0])} and rank {other} under "
            f"{quoted(tags[other])}; give every rank the same tag"
        )
        if tag_validation == "fail":
            raise UsageError(text)
        if is_first:
            log.warning("%s; rank 0's is used", text)
    return tags[0]


# -- what is saved ------------------------------------------------------------------------------------------


def collect(
    parts: Parts,
    counters: Counters,
    client_state: Mapping[str, Any] | None,
    options: SaveOptions,
    *,
    is_alone: bool = False,
) -> Content:
    """Collect the content. All refusals happen here, before any file is written. is_alone: see `Snapshot`."""
    if parts.sharded.backward_pass.has_seen_one:
        raise UsageError(
            "save_checkpoint() between backward() and step(): the gradients of this micro-batch would be "
            "incomplete; call step() first"
        )
    parts.sharded.backward_pass.end_checked()
    parts.sharded.complete_sums()
    parts.updater.take_edits()
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater, is_alone=is_alone)
    if options.exclude_frozen_parameters:
        snapshot.leave_out_frozen()
    content = Content(snapshot)
    totals = snapshot.grad_totals()
    outer = parts.outer.blocks(snapshot)
    for block in (*snapshot.values, *snapshot.states, *totals, *snapshot.pending_errors(), *outer):
        content.add(block)
    is_accumulating = bool(totals or snapshot.grad_locals()) or snapshot.has_kept_grads
    state = _engine_state(parts, counters, is_accumulating)
    _warn_of_values(state, is_first=snapshot.rank == 0)
    state |= snapshot.pending_error_state()
    put = partial(content.put, "engine")
    packed = {key: pack(value, key, put) for key, value in state.items()}
    packed["client_state"] = pack(dict(client_state or {}), "client_state", put)
    if snapshot.rank == 0:
        content.state = packed
    else:  # packed on every rank so that all ranks refuse the same values; the tensors are kept once
        content.entries = [
            entry for entry in content.entries if not entry.name.startswith("engine/")
        ]
    return content


def _engine_state(parts: Parts, counters: Counters, is_accumulating: bool) -> dict[str, Any]:
    scheduler = parts.scheduler
    accumulation = counters.accumulation
    has_state = scheduler is not None and hasattr(scheduler, "state_dict")
    return {
        "counters": {
            "global_steps": counters.global_steps,
            "micro_steps": counters.micro_steps,
            "skipped_steps": counters.skipped_steps,
            "global_samples": counters.global_samples,
            "accumulation_steps": accumulation.steps_now,
            "accumulated": accumulation.done,
            "is_accumulating": is_accumulating,
            "best_metric": counters.best_metric,  # of the saves before this one, whose score is not agreed yet
            "saves_since_best": counters.saves_since_best,
        },
        "loss_scale": parts.loss_scale.state_dict(),
        "optimizer": _optimizer_state(parts.optimizer),
        "lr_scheduler": {"type": type(scheduler).__name__, "state": scheduler.state_dict()}  # type: ignore[union-attr]
        if has_state
        else None,
        "data": loader_position(parts.loader),
        **parts.outer.state(),
    }


def engine_state(parts: Parts, counters: Counters) -> dict[str, Any]:
    """Counters, hyperparameters, schedule and position after a step, as JSON values.

    Raises UsageError: there is a tensor in them.
    """

    def put(_: Tensor) -> str:
        raise UsageError(
            "the state of the schedule or a hyperparameter is a tensor, which a new process of another group "
            "cannot take; make it a number"
        )

    state = _engine_state(parts, counters, is_accumulating=False)
    return {key: pack(value, key, put) for key, value in state.items()}


def _warn_of_values(state: dict[str, Any], *, is_first: bool) -> None:
    """Say now what a load will refuse. The values are saved: the weights can be loaded."""
    try:
        check_state_values(state)
    except ValueError as error:
        if is_first:
            log.warning(
                "save_checkpoint: %s; a load will need load_optimizer_states=False and "
                "load_lr_scheduler_states=False",
                error,
            )


def _optimizer_state(optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"type": kind_of(optimizer), "groups": groups}


def _buffer_blocks(snapshot: Snapshot) -> dict[str, StateBlock]:
    flats = snapshot.flats
    blocks = [block for block in snapshot.values if flats[block.flat].kind == "buffer"]
    return {flats[block.flat].slots[0].name: block for block in blocks}


def buffer_sums(snapshot: Snapshot) -> dict[str, int]:
    return {
        name: zlib.crc32(bytes_of(dense(block.tensor)))
        for name, block in _buffer_blocks(snapshot).items()
    }


def add_own(
    content: Content,
    parts: Parts,
    counters: Counters,
    sums: list[dict[str, int]],
    random: Mapping[str, Any] | None = None,
) -> None:
    """Add this rank's own values: random generators, unreduced gradients, buffers that differ.

    The first rank that has a buffer saves it for all; others save theirs where `sums`, by rank, differ.
    random: states of generators instead of those that they have now.
    """
    snapshot = content.snapshot
    mine = sums[snapshot.rank]
    with_it = {name: [rank for rank, there in enumerate(sums) if name in there] for name in mine}
    blocks = _buffer_blocks(snapshot)
    content.drop({blocks[name].flat for name in mine if with_it[name][0] != snapshot.rank})
    buffers = {
        name: blocks[name].tensor
        for name, ranks in with_it.items()
        if sums[ranks[0]][name] != mine[name]
    }
    grads = {
        str(flat): {"local": local, "filled": filled}
        for flat, (local, filled) in snapshot.grad_locals().items()
    }
    generators = read_random_state(parts.device) if random is None else dict(random)
    own = {"random": generators, "buffers": buffers, "grads": grads}
    means = counters.means.state()
    if means is not None:
        own["means"] = means
    if keeps_position(parts.loader):
        own["data"] = parts.loader.state_dict()
    content.own = pack(own, "own", partial(content.put, "own"))
