"""Ranks that save in a loop and are killed at some moment, and checks of what remains.

Every state is a function of its step, so the expected contents of a checkpoint are known when it is loaded.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from growth import mixture
from helpers import _context as context

START_SECONDS = 60
END_SECONDS = 60
PATIENCE_SECONDS = 5  # of a save in the background, for a peer that was killed
_one_at_a_time = threading.Lock()  # multiprocessing also polls the children of other threads
TAG = "here"  # where all saves go under the same name


@dataclass(frozen=True)
class Scenario:
    """How the ranks save, and who is killed."""

    stage: int = 1
    width: int = 16
    layers: int = 2
    same_tag: bool = False
    keep_last: int = 0
    async_save: bool = False
    victims: str = "one"  # a random one, or "all"
    # of the two ranks: "pipeline", "slices", "experts"; "offload": data ranks, states in host memory
    layout: str = ""

    @property
    def label(self) -> str:
        layout = f"{self.layout}, " if self.layout else ""
        tags = "the same tag" if self.same_tag else "new tags"
        keep = f", keep_last {self.keep_last}" if self.keep_last else ""
        how = ", async" if self.async_save else ""
        return f"{layout}{tags}{keep}{how}, {self.victims} killed"


@dataclass
class Tally:
    """What was seen after kills."""

    kills: int = 0
    inside: int = 0  # of them during a save
    newer_than_latest: int = 0  # of them between a commit and `latest`
    committed_unreported: int = 0  # of them after the commit, before the save returned
    checked: int = 0  # checkpoints of which every byte was summed
    unloadable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what the next saves did not clean
    slowest_end_seconds: float = 0.0  # of a rank whose peer was killed

    @property
    def problems(self) -> list[str]:
        return [*self.unloadable, *self.lost, *self.left]


# -- states as a function of the step -----------------------------------------------------------------------


def expected(name: str, key: str, start: int, stop: int, step: int) -> Any:
    """Elements [start, stop) of a state at `step`; exact in fp32."""
    import torch

    seed = zlib.crc32(f"{name}/{key}".encode()) + step * 7919
    return ((torch.arange(start, stop) * 31 + seed) % 65521).float() / 64


def parts_of(engine: Any) -> list[tuple[str, str, int, int, Any]]:
    """(name, key, start, stop, memory) of all that this rank holds."""
    from xds.zero.checkpoint.ranges import pieces
    from xds.zero.checkpoint.snapshot import Snapshot

    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater)
    found = []
    for block in (*snapshot.values, *snapshot.states):
        flat = block.tensor.detach().reshape(-1)
        slots = {slot.name: slot for slot in snapshot.flats[block.flat].slots}
        for piece in pieces(snapshot.flats[block.flat], block.start, block.stop):
            memory = flat[piece.target : piece.target + piece.stop - piece.start]
            box, first = slots[piece.name].box, 0
            if box is not None:  # whole rows of a tensor
                first = box.ranges[0][0] * math.prod(box.whole[1:])
            place = (first + piece.start, first + piece.stop)
            found.append((piece.name, block.key, *place, memory))
    return found


def make_engine(scenario: Scenario, stage: int, layout: str = "") -> Any:
    """A tiny engine whose optimizer has its states."""
    import torch

    import xds

    torch.manual_seed(0)
    width = scenario.width
    layers = [torch.nn.Linear(width, width) for _ in range(scenario.layers)]
    if scenario.layout == "experts":
        layers.append(mixture(4, width))
    model: Any = torch.nn.Sequential(*layers)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    section = {"keep_last": scenario.keep_last, "async_save": scenario.async_save}
    if any(section.values()):
        config["checkpoint"] = section
    if layout == "offload":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if layout == "experts":
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    if layout == "slices":
        plan = {str(layer): "colwise_gather_output" for layer in range(scenario.layers)}
        config["tensor_parallel"] = {"tp_size": 2, "plan": plan}
    if layout == "pipeline":
        model = xds.pipe.PipelineModule(layers, 2, loss_fn=torch.nn.functional.mse_loss)
        config |= {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}
        config["zero_optimization"]["stage"] = min(stage, 1)
    engine = xds.initialize(model, config)
    batch = torch.randn(1, width)
    if layout == "pipeline":
        engine.train_batch(iter([(batch, batch)] * 2))
    else:
        engine.backward(engine(batch).square().mean())
        engine.step()
    return engine


# -- the ranks ----------------------------------------------------------------------------------------------


def _save_for_ever(
    rank: int, rendezvous: str, pipe: Any, folder: str, scenario: Scenario, num_saves: int
) -> None:
    import torch
    import torch.distributed as dist

    import xds

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["XDS_TIMEOUT_SECONDS"] = str(PATIENCE_SECONDS)
    with open(f"{rendezvous}.{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    engine = make_engine(scenario, scenario.stage, scenario.layout)
    newest = xds.newest_checkpoint(folder)
    if newest is not None:
        engine.load_checkpoint(folder, newest)
    memory = parts_of(engine)
    last_step = engine.global_steps + num_saves if num_saves else 1 << 30
    pipe.send_bytes(b"ready")
    while engine.global_steps < last_step:
        engine.global_steps += 1
        step = engine.global_steps
        for name, key, start, stop, part in memory:
            part.copy_(expected(name, key, start, stop, step))
        pipe.send_bytes(b"begin %d" % step)
        client_state = {"step": step, "tensor": expected("client", "", 0, 9, step)}
        engine.save_checkpoint(folder, TAG if scenario.same_tag else None, client_state)
        if scenario.async_save:
            for *_, part in memory:  # training continues
                part.zero_()
            engine.wait_for_checkpoint()
        pipe.send_bytes(b"done %d" % step)
    dist.barrier()
    os._exit(0)


class Run:
    """Two ranks that save without end; `num_saves` of 0 is for ever."""

    def __init__(self, folder: Path, scenario: Scenario, num_saves: int = 0) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.ranks, self._pipes = [], []
        self.received: list[list[str]] = [[], []]
        self.said = ""
        for rank in range(2):
            here, there = context.Pipe(duplex=False)
            args = (rank, f"{self._scratch.name}/meet", there, str(folder), scenario, num_saves)
            process = context.Process(target=_save_for_ever, args=args, daemon=True)
            with _one_at_a_time:
                process.start()
            there.close()
            self.ranks.append(process)
            self._pipes.append(here)

    def listen(self, seconds: float) -> None:
        """Take what the ranks say for so long, or until all pipes are closed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            open_pipes = [pipe for pipe in self._pipes if not pipe.closed]
            if not open_pipes:
                return
            for pipe in wait(open_pipes, left):
                try:
                    self.received[self._pipes.index(pipe)].append(pipe.recv_bytes().decode())  # type: ignore[union-attr, arg-type]
                except EOFError:
                    pipe.close()  # type: ignore[union-attr]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all("ready" in words_of_rank for words_of_rank in self.received):
            self.listen(0.01)
            if time.monotonic() > deadline or any(pipe.closed for pipe in self._pipes):
                raise AssertionError(f"the ranks did not start: {self.output()}")

    def end(self) -> float:
        """Wait for every rank's end and read their last messages; the seconds that it took."""
        start = time.monotonic()
        self.listen(END_SECONDS)
        if not all(pipe.closed for pipe in self._pipes):
            for process in self.ranks:
                process.kill()
            raise AssertionError(f"a rank hangs: {self.output()}")
        with _one_at_a_time:
            for process in self.ranks:
                process.join()
        seconds = time.monotonic() - start
        self.said = self.output()
        self._scratch.cleanup()
        return seconds

    def output(self) -> str:
        """What the ranks printed."""
        return "\n".join(path.read_text() for path in Path(self._scratch.name).glob("*.txt"))

    @property
    def last_done(self) -> int:
        """The last step that a rank reported as saved."""
        words = [one.split() for words_of_rank in self.received for one in words_of_rank]
        return max((int(word[1]) for word in words if word[0] == "done"), default=0)

    @property
    def is_inside(self) -> bool:
        return any(
            words_of_rank[-1].startswith("begin")
            for words_of_rank in self.received
            if words_of_rank
        )


# -- a kill, and what is left -------------------------------------------------------------------------------


class Killer:
    """Kills runs in one folder, one after the other: each resumes from the last one."""

    def __init__(self, scenario: Scenario, seed: int, window_seconds: float) -> None:
        self.scenario = scenario
        self.tally = Tally()
        self._random = random.Random(seed)
        self._window_seconds = window_seconds
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name) / "saved"
        self._reader = make_engine(scenario, 0)
        self._sums: dict[tuple[str, int], int] = {}

    def trial(self) -> None:
        """Start, kill at some instant, look."""
        run = Run(self.folder, self.scenario)
        run.wait_ready()
        run.listen(self._random.uniform(0, self._window_seconds))
        victims = list(run.ranks)
        self._random.shuffle(victims)
        for process in victims[:1] if self.scenario.victims == "one" else victims:
            process.kill()
        seconds = run.end()
        self.tally.kills += 1
        self.tally.inside += run.is_inside
        if self.scenario.victims == "one":
            self.tally.slowest_end_seconds = max(self.tally.slowest_end_seconds, seconds)
        where = f"{self.scenario.label}, kill {self.tally.kills}"
        try:
            self._check(run.last_done, where)
        except Exception as error:
            self.tally.unloadable.append(f"{where}: {type(error).__name__}: {error}\n{run.said}")

    def _check(self, last_done: int, where: str) -> None:
        """All that looks like a checkpoint is one; the newest is not older than the last one reported."""
        import xds
        from xds.engine.checkpoint.io.folders import MANIFEST, committed, read_latest

        if not self.folder.is_dir():
            return
        found = committed(self.folder)
        shown = [path for path in self.folder.iterdir() if path.is_dir()]
        shown = [path for path in shown if not path.name.startswith(".")]
        for path in shown:
            if not (path / MANIFEST).exists():
                self.tally.unloadable.append(f"{where}: {path} has no manifest")
        if len(found) != len(shown):
            self.tally.unloadable.append(f"{where}: {len(shown)} folders, {len(found)} checkpoints")
        for manifest in found:
            self._sum_up(manifest)
        steps = {manifest.tag: manifest.global_steps for manifest in found}
        newest = xds.newest_checkpoint(self.folder)
        newest_step = steps.get(newest, 0) if newest else 0
        named = read_latest(self.folder)
        named_step = steps.get(named, 0) if named else 0
        if min(newest_step, named_step) < last_done:
            self.tally.lost.append(
                f"{where}: step {last_done} was saved; newest is {newest}, latest says {named}"
            )
        self.tally.committed_unreported += newest_step > last_done
        self.tally.newer_than_latest += newest_step > named_step
        for tag in {newest, named} - {None}:
            self._load(str(tag), steps[str(tag)])

    def _sum_up(self, manifest: Any) -> None:
        """Raises where a file differs from the manifest."""
        for record in manifest.files:
            path = self.folder / manifest.tag / record.path
            key = (str(path), path.stat().st_mtime_ns)
            if key in self._sums:
                continue
            content = path.read_bytes()
            size = record.chunk_bytes
            sums = tuple(zlib.crc32(content[at : at + size]) for at in range(0, len(content), size))
            if len(content) != record.size_bytes or sums != tuple(record.crc32):
                raise AssertionError(f"{path} is not what its manifest says")
            self._sums[key] = 1
        self.tally.checked += 1

    def _load(self, tag: str, step: int) -> None:
        """Raises where it does not load, on one rank, or holds something else than what was saved."""
        import torch

        reader = self._reader
        _, client_state = reader.load_checkpoint(self.folder, tag)
        assert reader.global_steps == step == client_state["step"], (tag, step, client_state)
        assert torch.equal(client_state["tensor"], expected("client", "", 0, 9, step))
        for name, key, start, stop, part in parts_of(reader):
            if not torch.equal(part, expected(name, key, start, stop, step)):
                raise AssertionError(f"{tag}: {key} of {name} is not that of step {step}")

    def finish(self) -> Tally:
        """Two saves without a kill must leave only checkpoints; returns the tally."""
        from xds.engine.checkpoint.io.folders import MANIFEST, committed

        run = Run(self.folder, self.scenario, num_saves=2)
        run.end()
        where = f"{self.scenario.label}, at the end"
        if any(process.exitcode for process in run.ranks):
            self.tally.unloadable.append(f"{where}: the last run failed: {run.said}")
            return self.tally
        self._check(run.last_done, where)
        self.tally.left += [
            f"{where}: {path} is left" for path in self.folder.iterdir() if path.name[0] == "."
        ]
        found = committed(self.folder)
        for manifest in found:
            needed = {record.path for record in manifest.files} | {MANIFEST}
            there = {path.name for path in (self.folder / manifest.tag).iterdir()}
            self.tally.left += [f"{where}: {manifest.tag}/{one} is left" for one in there - needed]
        keep = self.scenario.keep_last
        if keep and len(found) > keep:
            self.tally.left.append(f"{where}: {len(found)} checkpoints are kept, not {keep}")
        self.close()
        return self.tally

    def thin_out(self) -> None:
        """Remove all but the newest checkpoints, as users do."""
        from xds.engine.checkpoint.io.folders import committed

        for manifest in committed(self.folder)[3:]:
            shutil.rmtree(self.folder / manifest.tag)

    def close(self) -> None:
        self._reader.destroy()
        self._scratch.cleanup()
