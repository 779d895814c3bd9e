"""Test helper: ranks that train a small model and receive a request to stop, and the files that remain."""

from __future__ import annotations

import gc
import os
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import _context as context

END_SECONDS = 60
SAMPLES, WIDTH = 61, 8


@dataclass(frozen=True)
class Run:
    """What the ranks train. Everything is kept in `folder`."""

    folder: str
    world_size: int = 2
    steps: int = 12
    stage: int = 1
    accumulation: int = 1
    async_save: bool = False
    seconds: float = 30.0
    step_seconds: float = 0.0
    elasticity: bool = False
    engines: int = 1
    unequal: int = 0  # rank 0 sleeps so many seconds after its last step, before destroy
    stuck_rank: int = -1  # sleeps for ever in its third step
    script_signals: bool = False  # another handler was there first
    saves: bool = True  # False: no handlers, so that the ranks may be threads

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints"

    def progress(self, rank: int) -> list[int]:
        """The steps that a rank has done, over all starts."""
        path = Path(self.folder) / f"steps.{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def losses(self) -> list[float]:
        """Over all ranks, one a step, over all starts."""
        return [float(line) for line in (Path(self.folder) / "losses").read_text().split()]

    def tags(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("global_step*"))


def config_of(run: Run, number: int = 0) -> dict[str, Any]:
    save_dir = str(run.checkpoints) + (f"_{number}" if number else "")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": run.stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {
            "preemption_save_dir": save_dir if run.saves else "",
            "preemption_seconds": run.seconds,
            "async_save": run.async_save,
        },
    }
    if run.elasticity:
        del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        config["elasticity"] = {
            "enabled": True,
            "max_train_batch_size": 12,
            "micro_batch_sizes": [1, 2, 3],
        }
    return config


def train(run: Run) -> list[float]:
    """One rank's part, from the newest checkpoint to the end: this rank's losses, one a step."""
    import torch

    torch.set_num_threads(1)
    engines = _engines(run)
    engine = engines[0]
    batches = [_forever(each.training_dataloader) for each in engines]
    losses = []
    with (Path(run.folder) / f"steps.{engine.global_rank}").open("a") as progress:
        while engine.global_steps < run.steps:
            if run.stuck_rank == engine.global_rank and engine.global_steps == 2:
                time.sleep(1000)
            # those that share its rank's time come first, so that the first engine's step ends the round
            for number in reversed(range(run.engines)):
                losses.append(_step(engines[number], batches[number], progress, number))
            time.sleep(run.step_seconds)
    if engine.global_rank == 0:
        time.sleep(run.unequal)
    states = [each.full_state_dict(full_precision=True) for each in engines]
    if run.unequal:  # the other rank waits for rank 0
        torch.distributed.barrier()
    if engine.global_rank == 0:
        torch.save(states, Path(run.folder) / "final.pt")
    for each in engines:
        each.destroy()
    return losses


def _engines(run: Run) -> list[Any]:
    """They resume from the newest checkpoints."""
    import torch

    import xds

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.roll(1, 1))
    engines = []
    for number in range(run.engines):
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, WIDTH)
        )
        config = config_of(run, number)
        engine = xds.initialize(model, config, training_data=data)
        where = config["checkpoint"]["preemption_save_dir"]
        tag = xds.newest_checkpoint(where) if where else None
        if tag is not None:
            engine.load_checkpoint(where, tag)
        engines.append(engine)
    return engines


def _step(engine: Any, batches: Any, progress: Any, number: int) -> float:
    import torch
    import torch.distributed as dist

    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, targets = next(batches)
        loss = (engine(inputs) - targets).square().mean()
        engine.backward(loss)
        total += loss.item() / engine.gradient_accumulation_steps()
        if not number and engine.is_gradient_accumulation_boundary():
            progress.write(f"{engine.global_steps + 1}\n")
            progress.flush()
            run = Path(progress.name).parent
            mean = torch.tensor(total, dtype=torch.float64)
            dist.all_reduce(mean)
            if engine.global_rank == 0:
                with (run / "losses").open("a") as losses:
                    losses.write(f"{mean.item() / engine.world_size}\n")
        engine.step()
    return total


def _forever(loader: Any) -> Any:
    while True:
        yield from loader


def _rank_main(run: Run, rank: int, port: int) -> None:
    import signal

    gc.freeze()  # a collection looks at what this rank makes, not at all of torch
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.world_size}
    os.environ |= {key: str(value) for key, value in environment.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "XDS_TIMEOUT_SECONDS": "50",
    }
    os.environ["XDS_GRACE_FILE"] = f"{run.folder}/grace.{rank}"
    with open(f"{run.folder}/out.{rank}", "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if run.script_signals:
        signal.signal(signal.SIGTERM, lambda *_: print("the script's own handler", flush=True))
    train(run)
    import torch.distributed as dist

    dist.destroy_process_group()


class Ranks:
    """Real processes, started at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            context.Process(target=_rank_main, args=(run, rank, port))
            for rank in range(run.world_size)
        ]
        for process in self.processes:
            process.start()

    def await_step(self, step: int, rank: int = 0) -> None:
        """Return when the rank is about to end `step`."""
        deadline = time.monotonic() + END_SECONDS
        while step not in self.run.progress(rank):
            assert time.monotonic() < deadline, self.said()
            assert self.processes[rank].is_alive(), self.said()
            time.sleep(0.002)

    def send(self, rank: int, signum: int) -> None:
        os.kill(self.processes[rank].pid, signum)

    def codes(self) -> list[int | None]:
        """The exit code of every rank, when all have ended."""
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(Path(self.run.folder).glob("out.*")))


def final(run: Run) -> Any:
    import torch

    return torch.load(Path(run.folder) / "final.pt")


def preempt_and_resume(run: Run, reference: Any, signum: int, seed: int) -> list[str]:
    """Ask a random rank at a random moment to stop, start all again: what is wrong."""
    import torch

    moment = random.Random(seed)
    ranks = Ranks(run)
    ranks.await_step(moment.randint(1, run.steps // 2))
    time.sleep(moment.random() * 0.03)
    ranks.send(moment.randrange(run.world_size), signum)
    codes = ranks.codes()
    if codes != [143] * run.world_size:
        return [f"exit codes {codes}: {ranks.said()}"]
    done = {tuple(run.progress(rank)) for rank in range(run.world_size)}
    wrong = [] if len(done) == 1 else [f"the ranks took different steps: {done}"]
    step = max(max(done))
    if run.tags() != [f"global_step{step}"]:
        wrong.append(f"checkpoints {run.tags()} after step {step}")
    codes = Ranks(run).codes()
    if codes != [0] * run.world_size:
        return [*wrong, f"then exit codes {codes}: {ranks.said()}"]
    if run.progress(0) != list(range(1, run.steps + 1)):
        wrong.append(f"steps {run.progress(0)}")
    for mine, other in zip(final(run), reference, strict=True):
        wrong += [f"{name} differs" for name in other if not torch.equal(mine[name], other[name])]
    return wrong
