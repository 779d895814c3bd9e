"""A signal to one rank: all ranks save at the same step and leave; what happens where they cannot."""

import contextlib
import gc
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from helpers import run_new_ranks
from preempted_runs import Ranks, Run, config_of, final, preempt_and_resume

import xds
from xds.engine import preemption

KINDS = {
    "two ranks": (Run("", 2, stage=1), signal.SIGTERM),
    "three ranks, accumulation": (Run("", 3, stage=2, accumulation=2), signal.SIGTERM),
    "stage 3, in the background": (Run("", 2, stage=3, async_save=True), signal.SIGUSR1),
    "two engines": (Run("", 2, stage=0, engines=2), signal.SIGTERM),
}


# -- real ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind.startswith("three") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_all_ranks_save_at_one_step_and_go_on_with_the_same_bits(kind, tmp_path):
    kind, signum = KINDS[kind]
    runs = [replace(kind, folder=str(tmp_path / name)) for name in ("undisturbed", "asked")]
    for run in runs:
        os.mkdir(run.folder)
    ranks = Ranks(runs[0])
    assert ranks.codes() == [0] * kind.world_size, ranks.said()
    asked = replace(runs[1], step_seconds=0.01)
    assert preempt_and_resume(asked, final(runs[0]), signum, seed=kind.world_size) == []


def test_signals_of_a_launcher_and_of_a_group_that_come_together_are_one_request(tmp_path):
    run = Run(str(tmp_path), 2, steps=1000, step_seconds=0.01)
    ranks = Ranks(run)
    ranks.await_step(3)
    for rank in (0, 1, 1, 0):
        ranks.send(rank, signal.SIGTERM)
    assert ranks.codes() == [143, 143], ranks.said()
    assert len(run.tags()) == 1
    said = ranks.said()
    assert said.count("; exiting") == 1 and "SIGTERM on rank" in said


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


def test_a_rank_that_reaches_no_boundary_gives_up_when_it_is_asked_again(tmp_path):
    run = Run(str(tmp_path), 2, seconds=50.0, stuck_rank=1)
    ranks = Ranks(run)
    ranks.await_step(3)
    ranks.send(1, signal.SIGTERM)
    time.sleep(2.5)
    ranks.send(1, signal.SIGTERM)
    ranks.processes[1].join(20)
    assert ranks.processes[1].exitcode == 143
    assert "the signal came again, nothing saved" in ranks.said()
    ranks.processes[0].kill()
    ranks.codes()


def test_a_request_after_the_last_step_lets_the_script_end(tmp_path):
    run = Run(str(tmp_path), 2, steps=3, unequal=2)
    ranks = Ranks(run)
    ranks.await_step(3, rank=1)
    time.sleep(0.5)
    ranks.send(1, signal.SIGTERM)
    assert ranks.codes() == [0, 0], ranks.said()
    assert run.tags() == []


def test_a_script_that_stays_after_its_last_step_is_ended_at_the_deadline(tmp_path):
    run = Run(str(tmp_path), 2, steps=2, at_end="stay", seconds=1.0)
    ranks = Ranks(run)
    ranks.await_step(2)
    time.sleep(0.3)
    for rank in (0, 1):
        ranks.send(rank, signal.SIGTERM)
    assert ranks.codes() == [143, 143], ranks.said()


def test_handlers_of_the_script_are_kept(tmp_path):
    run = Run(str(tmp_path), 2, steps=1000, step_seconds=0.01, script_signals=True)
    ranks = Ranks(run)
    ranks.await_step(3)
    ranks.send(1, signal.SIGTERM)
    assert ranks.codes() == [143, 143], ranks.said()
    assert len(run.tags()) == 1
    assert ranks.said().count("the script's own handler") == 1


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


def _engine(folder, number=0):
    return xds.initialize(torch.nn.Linear(8, 8), config_of(Run(folder), number))


def _handlers_come_and_go(folder):
    os.environ["XDS_GRACE_FILE"] = f"{folder}/grace"
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    engine, other = _engine(folder), _engine(folder, 1)
    during = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    asked = open(f"{folder}/grace").read()
    engine.destroy()
    between = signal.getsignal(signal.SIGTERM)
    other.destroy()
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    assert before == after and before[0] != during[0] and between == during[0]
    assert not os.path.exists(f"{folder}/grace")
    return float(asked)


def test_handlers_and_grace_file_go_with_the_last_engine(tmp_path):
    (asked,) = run_new_ranks(_handlers_come_and_go, 1, str(tmp_path))
    assert asked == 32.0  # preemption_seconds, and a margin


def _ignored_stays_ignored(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = _engine(folder)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_an_ignored_signal_stays_ignored(tmp_path):
    run_new_ranks(_ignored_stays_ignored, 1, str(tmp_path))


def _child_is_ended(folder):
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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_is_told_to_stop_stops_alone(tmp_path):
    run_new_ranks(_child_is_ended, 1, str(tmp_path))


def _same_folder(folder):
    engine = _engine(folder)
    with pytest.raises(xds.UsageError, match="another engine of this process saves there"):
        _engine(folder)
    engine.destroy()
    _engine(folder).destroy()


def test_two_engines_cannot_save_into_one_folder(tmp_path):
    run_new_ranks(_same_folder, 1, str(tmp_path))


def _step_until_preempted(engine):
    with pytest.raises(xds.Preempted):
        while True:
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()


def _preempted(folder):
    engine = _engine(folder)
    os.kill(os.getpid(), signal.SIGTERM)
    caught = None
    try:
        while True:
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
    except SystemExit as error:
        caught = error
    engine.destroy()
    assert isinstance(caught, xds.Preempted) and caught.code == 143
    assert os.path.isdir(caught.path) and "SIGTERM on rank 0" in str(caught)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _asked_after_engines_before(folder):
    """One engine was dropped without destroy, two were saved; the deadline of those requests is gone."""
    gc.disable()  # engines are in reference cycles
    config = config_of(Run(folder))
    xds.initialize(torch.nn.Linear(8, 8), config)
    for _ in range(2):
        engine = xds.initialize(torch.nn.Linear(8, 8), config)
        os.kill(os.getpid(), signal.SIGTERM)
        _step_until_preempted(engine)
        engine.destroy()
    engine = xds.initialize(torch.nn.Linear(8, 8), config)
    assert preemption._signals._deadline is None
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_ends_with_its_engines(tmp_path):
    run_new_ranks(_asked_after_engines_before, 1, str(tmp_path))


def _first_engine_is_idle(folder):
    run = Run(folder, seconds=60.0)
    engines = [xds.initialize(torch.nn.Linear(8, 8), config_of(run, number)) for number in range(2)]
    os.kill(os.getpid(), signal.SIGTERM)
    preemption._signals._received[signal.SIGTERM] -= 31  # seconds
    _step_until_preempted(engines[1])
    assert run.tags() == ["global_step0"]


def test_a_first_engine_without_steps_does_not_prevent_the_save(tmp_path):
    run_new_ranks(_first_engine_is_idle, 1, str(tmp_path))


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


def test_a_request_after_the_last_step_of_an_engine_is_one_to_the_next(tmp_path):
    run_new_ranks(_asked_between_engines, 1, str(tmp_path))


def _earlier_save_has_failed(folder):
    engine = _engine(folder)

    def fail():
        raise xds.XdsError("an earlier save")

    engine._parts.saver.check = fail
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(xds.XdsError, match="an earlier save"):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    _step_until_preempted(engine)


def test_the_failure_of_an_earlier_save_is_raised_after_the_save(tmp_path):
    run_new_ranks(_earlier_save_has_failed, 1, str(tmp_path))


def _asked_in_destroy(folder):
    run = Run(folder, async_save=True)
    engine = xds.initialize(torch.nn.Linear(8, 8), config_of(run))
    engine.save_checkpoint(str(run.checkpoints))
    close = engine._parts.saver.close

    def close_when_asked():
        os.kill(os.getpid(), signal.SIGTERM)
        close()

    engine._parts.saver.close = close_when_asked
    engine.destroy()
    assert run.tags() == ["global_step0"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_in_destroy_does_not_end_a_save_in_the_background(tmp_path):
    run_new_ranks(_asked_in_destroy, 1, str(tmp_path))


def test_a_script_may_catch_it_and_close_its_things(tmp_path):
    run_new_ranks(_preempted, 1, str(tmp_path))


def _preempted_unread(folder, kind):
    if kind == "a full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
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
    _preempted(folder)


@pytest.mark.parametrize("kind", ["nobody", "a full pipe", "a full disk"])
def test_it_saves_whoever_reads_standard_error(kind, tmp_path):
    run_new_ranks(_preempted_unread, 1, str(tmp_path), kind)
