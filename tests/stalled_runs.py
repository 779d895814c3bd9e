"""Test helper: ranks that fail on purpose, each in one way, and their reports."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from divergent_models import build, config_of, samples

import xds
from xds.engine.process.process import join
from xds.ops.comm.mesh_groups import MeshGroups
from xds.ops.comm.opening import open_collectives
from xds.ops.mesh import Mesh
from xds.ops.watch.config import WatchConfig

ALL = (0, 1, 2)


def engine_of(stage: int, **watch: Any) -> xds.Engine:
    config = {**config_of(stage), "watch": {"heartbeat_seconds": 0.25, **watch}}
    return xds.initialize(build("early exit"), config)


def one_step(engine: xds.Engine, step: int) -> None:
    loss = engine(samples(engine.global_rank, step), ALL)
    engine.backward(loss)
    engine.step()


class Lines(logging.Handler):
    """What the watcher logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("xds").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome_of(steps: Callable[[], Any]) -> dict[str, Any]:
    """What `steps` raised, how long it took, and what was logged meanwhile."""
    heard, begin = Lines(), time.monotonic()
    error = ""
    try:
        steps()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - begin
    return {"error": error, "seconds": seconds, "lines": heard.lines}


def stop_a_rank(stage: int, folder: str) -> dict[str, Any]:
    """Rank 1 is stopped by a signal after two steps, and continues when the others have reported it."""
    engine = engine_of(stage)
    os.environ["XDS_DUMP_DIR"] = folder

    def steps() -> None:
        for step in range(4):
            if engine.global_rank == 1 and step == 2:
                if os.fork() == 0:  # it wakes us when all others have spoken
                    while len(list(Path(folder).glob("said.*"))) < engine.world_size - 1:
                        time.sleep(0.05)
                    os.kill(os.getppid(), signal.SIGCONT)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGSTOP)
            one_step(engine, step)

    found = outcome_of(steps)
    Path(folder, f"said.{engine.global_rank}").touch()
    return found


def sleep_in_the_loader(stage: int, folder: str) -> dict[str, Any]:
    """Rank 1's data takes longer than the timeout."""
    engine = engine_of(stage)
    os.environ["XDS_DUMP_DIR"] = folder

    def next_batch(step: int) -> None:
        if engine.global_rank == 1 and step == 1:
            while not Path(folder, "said").exists():
                time.sleep(0.05)

    def steps() -> None:
        for step in range(3):
            next_batch(step)
            one_step(engine, step)

    found = outcome_of(steps)
    if engine.global_rank == 0:
        Path(folder, "said").touch()
    return found


def skip_a_save(stage: int) -> dict[str, Any]:
    """Rank 1 skips save_checkpoint and continues with its steps."""
    engine = engine_of(stage)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank != 1:
            engine.save_checkpoint(tempfile.gettempdir())
        one_step(engine, 1)

    return outcome_of(steps)


def skip_an_access(stage: int) -> dict[str, Any]:
    """Rank 1 does not ask for the parameter."""
    engine = engine_of(stage)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank != 1:
            xds.zero.get_full_param(next(iter(engine.module.parameters())))
        one_step(engine, 1)

    return outcome_of(steps)


def wait_and_go_on(stage: int) -> dict[str, Any]:
    """Rank 1 is late, but not too late."""
    engine = engine_of(stage, notice_seconds=0.5)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank == 1:
            time.sleep(2.0)
        one_step(engine, 1)

    return outcome_of(steps)


def skip_own_collective(stage: int) -> dict[str, Any]:
    """The script has a collective of its own, which rank 1 leaves out."""
    engine = engine_of(stage)
    loss = torch.zeros(3)

    def steps() -> None:
        one_step(engine, 0)
        if engine.global_rank != 1:
            dist.all_reduce(loss)
        one_step(engine, 1)

    return outcome_of(steps)


def sleep_quietly(stage: int) -> dict[str, Any]:
    """Every rank idles for longer than the timeout, in different places, while no rank waits."""
    engine = engine_of(stage)

    def steps() -> None:
        one_step(engine, 0)
        time.sleep(5.0)
        one_step(engine, 1)
        time.sleep(0.5 * engine.global_rank)
        one_step(engine, 2)

    return outcome_of(steps)


def other_shapes(stage: int) -> dict[str, Any]:
    """Rank 1 built another model."""
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4 + 3 * rank))
    return outcome_of(lambda: xds.initialize(model, config_of(stage)))


def never_raise(folder: str) -> None:
    """Rank 1's main thread sits in a wait that cannot raise: its process is ended for it."""
    engine = engine_of(2)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{engine.global_rank}.json"
    one_step(engine, 0)
    if engine.global_rank == 1:
        watch = engine._sharded.collectives._watch
        watch.begin_wait(watch.start("all_gather", 0))
    while not Path(folder, "error1.json").exists():
        time.sleep(0.1)
    time.sleep(engine.global_rank)  # a rank that ends is not to end the other one's wait


def swap_blocks() -> dict[str, Any]:
    """Rank 1 calls the first two blocks the other way round."""
    zero = {"stage3_max_reuse_distance": 0, "overlap_comm": False}
    engine = xds.initialize(build("early exit"), config_of(3, **zero))
    route = (1, 0, 2) if engine.global_rank == 1 else ALL
    return outcome_of(lambda: engine(samples(0, 0), route))


def over_tcp(rank: int, world_size: int, port: int, pipe: Any, folder: str) -> None:
    """A rank of its own group over a TCPStore, as launchers make it; rank 0 keeps the store."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(XDS_TIMEOUT_SECONDS="3", XDS_DUMP_DIR=folder, TORCH_FR_BUFFER_SIZE="16")
    engine = engine_of(2)
    one_step(engine, 0)
    dist.all_reduce(torch.zeros(2, 3))  # torch's flight recorder keeps it
    found = outcome_of(lambda: rank == 1 or one_step(engine, 1))
    if rank == 1:
        time.sleep(4.5)
    engine.destroy()
    names_left = [thread.name for thread in threading.enumerate()]
    pipe.send({**found, "threads": names_left})
    dist.destroy_process_group()


def lose_a_rank_in_new_group(rank: int, world_size: int, port: int, pipe: Any) -> None:
    """The last rank's process ends when it is to join a group, which the others wait for in torch."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    group = join(torch.device("cpu"))
    world = open_collectives(group, torch.device("cpu"))
    world.start_watching(WatchConfig(heartbeat_seconds=0.25), 600)
    groups = MeshGroups(Mesh(pipe=1, data=2, tensor=2), group, world, 600)
    groups.along("tensor")
    if rank == world_size - 1:
        dist.new_group = lambda *_, **__: os._exit(1)
    found = outcome_of(lambda: groups.along(("data", "tensor"), "all"))
    pipe.send(found)
    os._exit(0)  # a thread is still in torch
