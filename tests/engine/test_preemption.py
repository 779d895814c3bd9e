"""A signal to one rank: all ranks save at the same step and leave; what happens where they cannot."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import _context as context
from helpers import run_new_ranks, run_ranks

import xds
from xds.engine import preemption

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
                losses.append(train_step(engines[number], batches[number], progress, number))
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


def train_step(engine: Any, batches: Any, progress: Any, number: int) -> float:
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
    return torch.load(Path(run.folder) / "final.pt")


def preempt_and_resume(run: Run, reference: Any, signum: int, seed: int) -> list[str]:
    """Ask a random rank at a random moment to stop, start all again: what is wrong."""
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


KINDS = {
    "accumulation": (Run("", 2, stage=2, accumulation=2), signal.SIGTERM),
    "stage 3, in the background": (Run("", 2, stage=3, async_save=True), signal.SIGUSR1),
    "two engines": (Run("", 2, stage=0, engines=2), signal.SIGTERM),
}


# -- real ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "accumulation" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_all_ranks_save_at_one_step_and_go_on_with_the_same_bits(kind, tmp_path):
    kind, signum = KINDS[kind]
    undisturbed = replace(kind, folder=str(tmp_path), saves=False)
    run_ranks(train, kind.world_size, undisturbed, small_numel=None)
    asked = replace(kind, folder=str(tmp_path / "asked"), step_seconds=0.01)
    os.mkdir(asked.folder)
    assert preempt_and_resume(asked, final(undisturbed), signum, seed=kind.world_size) == []


def test_signals_of_a_launcher_and_of_a_group_are_one_request_and_the_scripts_handler_is_kept(
    tmp_path,
):
    run = Run(str(tmp_path), 2, steps=1000, step_seconds=0.01, script_signals=True)
    ranks = Ranks(run)
    ranks.await_step(3)
    for rank in (0, 1, 1, 0):
        ranks.send(rank, signal.SIGTERM)
    assert ranks.codes() == [143, 143], ranks.said()
    assert len(run.tags()) == 1
    said = ranks.said()
    assert said.count("; exiting") == 1 and "SIGTERM on rank" in said
    assert "the script's own handler" in said


def test_a_rank_that_reaches_no_boundary_leaves_at_the_deadline(tmp_path):
    run = Run(str(tmp_path), 2, seconds=1.0, stuck_rank=1)
    ranks = Ranks(run)
    ranks.await_step(3)  # rank 0 is in a collective that rank 1 never joins
    ranks.send(0, signal.SIGTERM)
    time.sleep(0.3)
    assert ranks.processes[0].exitcode is None  # inside the collective Python handles no signal
    ranks.send(1, signal.SIGTERM)
    ranks.processes[1].join(20)
    assert ranks.processes[1].exitcode == 143
    assert run.tags() == []
    assert "preemption_seconds are over, nothing saved" in ranks.said()
    ranks.processes[0].kill()
    ranks.codes()


def test_a_request_after_the_last_step_lets_the_script_end(tmp_path):
    run = Run(str(tmp_path), 2, steps=3, unequal=1)
    ranks = Ranks(run)
    ranks.await_step(3, rank=1)
    time.sleep(0.3)
    ranks.send(1, signal.SIGTERM)
    assert ranks.codes() == [0, 0], ranks.said()
    assert run.tags() == []


@pytest.mark.slow
def test_an_elastic_run_keeps_its_batches_and_its_curve_as_ranks_come_and_go(tmp_path):
    runs = [Run(str(tmp_path / name), 4, steps=14, elasticity=True) for name in ("whole", "parts")]
    for run in runs:
        os.mkdir(run.folder)
    whole, parts = Ranks(runs[0]), runs[1]
    assert whole.codes() == [0] * 4, whole.said()
    for world_size, step in ((4, 3), (2, 8), (1, 11), (3, 0)):
        part = replace(parts, world_size=world_size, step_seconds=0.02 if step else 0)
        ranks = Ranks(part)
        if step:
            ranks.await_step(step)
            ranks.send(world_size - 1, signal.SIGTERM)
        assert ranks.codes() == [143 if step else 0] * world_size, ranks.said()
    assert parts.progress(0) == list(range(1, 15))
    assert parts.losses() == pytest.approx(runs[0].losses(), rel=1e-4)
    for name, value in final(runs[0])[0].items():
        torch.testing.assert_close(final(parts)[0][name], value, rtol=1e-4, atol=1e-5)


# -- one process ----------------------------------------------------------------------------------------


def _engine(folder, number=0, **changes):
    return xds.initialize(torch.nn.Linear(8, 8), config_of(Run(folder, **changes), number))


def _step(engine):
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()


def _step_until_preempted(engine, **says):
    with pytest.raises(xds.Preempted, **says) as caught:
        while True:
            _step(engine)
    return caught.value


def _handlers_come_and_go(folder):
    """They and the grace file go with the last engine; two engines cannot save into one folder."""
    os.environ["XDS_GRACE_FILE"] = f"{folder}/grace"
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    engine, other = _engine(folder), _engine(folder, 1)
    with pytest.raises(xds.UsageError, match="another engine of this process saves there"):
        _engine(folder)
    during = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    assert float(open(f"{folder}/grace").read()) == 32.0  # preemption_seconds, and a margin
    engine.destroy()
    between = signal.getsignal(signal.SIGTERM)
    other.destroy()
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    assert before == after and before[0] != during[0] and between == during[0]
    assert not os.path.exists(f"{folder}/grace")


def _a_child_is_ended(folder):
    """A forked child that is told to stop stops alone."""
    engine = _engine(folder)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"here")
        time.sleep(30)
        os._exit(0)
    os.read(reader, 4)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    time.sleep(0.6)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not engine._parts.preemption.is_asked
    engine.destroy()


def _preempted(folder):
    """A script may catch it and close its things. Its last client_state is kept: it counts epochs by it."""
    engine = _engine(folder)
    engine.save_checkpoint(folder, "first", client_state={"epoch": 4})
    os.kill(os.getpid(), signal.SIGTERM)
    caught = _step_until_preempted(engine, match="SIGTERM on rank 0")
    engine.destroy()
    assert caught.code == 143 and os.path.isdir(caught.path)
    other = _engine(folder)
    assert other.resume(os.path.dirname(caught.path)) == (caught.path, {"epoch": 4})
    assert other.last_client_state == {"epoch": 4}
    other.destroy()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _asked_after_engines_before(folder):
    """One engine was dropped without destroy, two were saved; the deadline of those requests is gone."""
    gc.disable()  # engines are in reference cycles
    _engine(folder)
    for _ in range(2):
        engine = _engine(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        _step_until_preempted(engine)
        engine.destroy()
    engine = _engine(folder)
    assert preemption._signals._deadline is None
    _step(engine)
    engine.destroy()
    gc.enable()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _first_engine_is_idle(folder):
    engines = [_engine(folder, number, seconds=60.0) for number in range(2)]
    os.kill(os.getpid(), signal.SIGTERM)
    preemption._signals._received[signal.SIGTERM] -= 31  # seconds
    _step_until_preempted(engines[1])
    assert Run(folder).tags() == ["global_step0"]
    for engine in engines:
        engine.destroy()


def _asked_between_engines(folder):
    """The script's handler calls the one before, which is of an engine that is gone."""
    engine = _engine(folder)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: before(*args))
    os.kill(os.getpid(), signal.SIGTERM)
    engine.destroy()
    engine = _engine(folder)
    _step_until_preempted(engine)
    os.kill(os.getpid(), signal.SIGTERM)  # it is cleaning up
    engine.destroy()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _earlier_save_has_failed(folder):
    """It does not take the place of the save that was asked for."""
    engine = _engine(folder, async_save=True)
    engine._parts.saver._failure = "an earlier save"
    os.kill(os.getpid(), signal.SIGTERM)
    _step_until_preempted(engine)
    assert xds.newest_checkpoint(Run(folder).checkpoints)
    engine.destroy()


def _asked_in_destroy(folder):
    """It does not end the save in the background that destroy waits for."""
    engine, run = _engine(folder, async_save=True), Run(folder)
    engine.save_checkpoint(str(run.checkpoints))
    close = engine._parts.saver.close

    def close_when_asked():
        os.kill(os.getpid(), signal.SIGTERM)
        close()

    engine._parts.saver.close = close_when_asked
    engine.destroy()
    assert run.tags() == ["global_step0"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption._signals._forget()


def _ignored_stays_ignored(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = _engine(folder)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def _one_after_the_other(folder):
    warnings.simplefilter("ignore")  # Python warns of a fork where threads are
    for number, case in enumerate(
        (
            _handlers_come_and_go,
            _a_child_is_ended,
            _preempted,
            _asked_after_engines_before,
            _first_engine_is_idle,
            _asked_between_engines,
            _earlier_save_has_failed,
            _asked_in_destroy,
            _ignored_stays_ignored,
        )
    ):
        case(f"{folder}/{number}")


def test_handlers_requests_children_and_exceptions_in_one_process(tmp_path):
    for number in range(9):
        (tmp_path / str(number)).mkdir()
    run_new_ranks(_one_after_the_other, 1, str(tmp_path))


def _unread(folder):
    """It saves whoever reads standard error: nobody, or a pipe that is full."""
    for kind in ("nobody", "a full pipe"):
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(writer)
        if kind == "nobody":
            os.close(reader)
        else:
            os.set_blocking(2, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(2, b"x" * 4096)
            os.set_blocking(2, True)
        _preempted(f"{folder}/{kind}")


@pytest.mark.slow
def test_it_saves_whoever_reads_standard_error(tmp_path):
    run_new_ranks(_unread, 1, str(tmp_path))


def _leaves(folder, kind):
    """It is asked, and ends no step; then it is asked again, or the deadline comes."""
    preemption.REPEATED_SECONDS = 0.1
    os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT), 2)
    engine = _engine(folder, seconds=50.0 if kind == "again" else 0.5)
    _step(engine)
    os.kill(os.getpid(), signal.SIGTERM)
    if kind == "again":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("again", "the signal came again"), ("deadline", "preemption_seconds are over")],
)
def test_a_process_that_ends_no_step_leaves_when_it_is_asked_again_or_at_the_deadline(
    kind, reason, tmp_path
):
    with pytest.raises(AssertionError, match="died with exit code 143"):
        run_new_ranks(_leaves, 1, str(tmp_path), kind)
    assert f"{reason}, nothing saved" in (tmp_path / "said").read_text()
