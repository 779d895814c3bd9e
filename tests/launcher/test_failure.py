"""Which of several failures is the first one, and how it is reported."""

import json
import signal
import traceback
from dataclasses import replace

import pytest
import torch

import xds
from xds.launcher.ranks.failure import (
    Failure,
    Kind,
    first_failure,
    last_lines,
    report,
    was_preempted,
)
from xds.launcher.ranks.run_folder import RunFolder

CLOSED = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:63176"
)
RESET = "torch.distributed.DistBackendError: recvBytes failed, Connection reset by peer"
NCCL = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
STORE = "DistNetworkError: Connection was likely closed. Did the remote server shutdown or crash?"


def died(rank, signum, at):
    return Failure(rank, 100 + rank, 128 + signum, at, signum=signum)


def raised(rank, text, at):
    return Failure(rank, 100 + rank, 1, at, text=text)


def test_the_loss_of_a_peer_is_recognized_by_its_text():
    for text in (CLOSED, RESET, NCCL, STORE):
        assert raised(0, text, 0.0).kind is Kind.LOST_PEER


def test_the_first_failure():
    for failures, first in (
        # a rank is killed; the agent notices the peer's exception before it
        ([raised(0, CLOSED, 1.0), died(1, signal.SIGKILL, 1.5)], 1),
        # an exception; the peer is stopped for it
        ([died(0, signal.SIGTERM, 0.5), raised(1, "ValueError: x", 1.0)], 1),
        # two causes of their own: time decides
        ([raised(0, "ValueError: x", 2.0), died(1, signal.SIGSEGV, 1.0)], 1),
        # a lost peer that nobody owns up to (it had finished) comes before being stopped
        ([died(0, signal.SIGTERM, 0.5), raised(1, CLOSED, 1.0)], 1),
        # somebody stopped a rank from outside; its peer was stopped for it
        ([died(0, signal.SIGTERM, 2.0), died(1, signal.SIGTERM, 1.0)], 1),
        # the same mistake everywhere
        ([raised(0, "TypeError: x", 2.0), raised(1, "TypeError: x", 1.0)], 0),
        # an error that wraps the loss of a peer
        ([raised(0, CLOSED + "\nMyError: x", 1.0), died(1, signal.SIGABRT, 2.0)], 1),
    ):
        assert first_failure(failures).rank == first, failures
        assert first_failure(failures[::-1]).rank == first, failures


def test_a_rank_killed_by_the_launcher_is_not_a_cause():
    hung = Failure(0, 100, 137, 1.0, signum=9, was_killed_by_us=True)
    assert first_failure([hung, raised(1, "ValueError: x", 5.0)]).rank == 1


def test_the_report_of_a_traceback():
    text = "Traceback (most recent call last):\n  ...\nValueError: x\n"
    first = replace(raised(2, text, 1.0), host="h1", log="/logs/rank2.log")
    failures = [first, raised(0, CLOSED, 1.1), raised(3, "ValueError: y", 1.2)]
    told = report(failures, []).splitlines()
    assert told[0] == "xds: rank 2 failed on h1: exit code 1 (pid 102)"
    assert told[1:4] == text.splitlines()
    assert told[4:] == [
        "xds: rank 3 failed as well",
        "xds: full output of rank 2: /logs/rank2.log",
    ]


def text_of(function):
    with pytest.raises(Exception) as raising:
        function()
    return "".join(traceback.format_exception(raising.value))


def wraps(error):
    try:
        raise error
    except type(error) as cause:
        raise xds.UsageError("the second sentence") from cause


def test_an_error_of_xds_is_its_sentence_and_where_the_script_calls():
    wrong = {"zero_optimization": {"stage": 7}, "x": 1}
    told = report([raised(0, text_of(lambda: xds.Config.load(wrong)), 1.0)], []).splitlines()
    assert told[1:4] == [
        "ConfigError: config: 2 problems",
        "  - x = 1: unknown key; remove it, or see docs/config.md for the keys",
        "  - zero_optimization.stage = 7: must be 0, 1, 2 or 3",
    ]
    assert "test_failure.py" in told[4] and "xds.Config.load(wrong)" in told[-1]
    assert not any("/engine/" in line or "^^^" in line for line in told)
    told = report([raised(0, text_of(lambda: wraps(xds.UsageError("the first"))), 1.0)], [])
    assert told.splitlines()[1] == "UsageError: the second sentence" and "cause" in told
    assert "The above exception" not in told
    text = text_of(lambda: wraps(ValueError("of the script")))  # what a script raises stays
    told = report([raised(0, text, 1.0)], [])
    assert "ValueError: of the script\n" in told and told.count("Traceback") == 2


def test_a_script_that_needs_deepspeed_is_told_the_option():
    """The words of Python, accelerate and transformers."""
    for error, helps in {
        "ModuleNotFoundError: No module named 'deepspeed'": True,
        "ImportError: DeepSpeed is not available => install it using `pip3 install deepspeed`": True,
        "importlib.metadata.PackageNotFoundError: No package metadata was found for The "
        "'deepspeed>=0.9.3' distribution was not found": True,
        "ImportError: cannot import name 'x' from 'deepspeed'": False,
        "ValueError: deepspeed": False,
    }.items():
        text = f"Traceback (most recent call last):\n  import deepspeed\n{error}\n"
        assert ("`xds --as-deepspeed`" in report([raised(0, text, 1.0)], [])) is helps, error


def test_a_script_whose_inputs_are_not_cast_is_told_so():
    for dtype, layer in (
        (torch.bfloat16, torch.nn.Linear(4, 4)),
        (torch.float16, torch.nn.Linear(4, 4)),
        (torch.bfloat16, torch.nn.Conv1d(4, 4, 1)),
        (torch.float32, torch.nn.Linear(3, 3)),  # another error
    ):
        with pytest.raises(RuntimeError) as raising:
            layer.to(dtype)(torch.zeros(4, 4, 4))
        text = "".join(traceback.format_exception(raising.value))
        told = report([raised(0, text, 1.0)], [])
        assert ("cast floating-point inputs" in told) is (dtype != torch.float32)


def test_the_report_of_a_silent_death_shows_the_last_lines(tmp_path):
    log = tmp_path / "rank1.log"
    log.write_text("".join(f"line {i}\n" for i in range(50)) + "1%\r50%\r99%")
    told = report([replace(died(1, signal.SIGKILL, 1.0), tail=last_lines(log))], [])
    assert "killed by SIGKILL, exit code 137" in told and "out of memory" in told
    assert "  | line 49\n  | 99%\n" in told and "line 30" not in told


def test_after_a_restart_the_last_lines_are_those_of_the_new_start(tmp_path):
    folder = RunFolder(tmp_path)
    folder.prepare([1], is_first=True)
    folder.log(1).write_text("of the first start\n")
    folder.prepare([1], is_first=False)
    assert last_lines(folder.log(1), folder.log_begins[1]) == ()
    with folder.log(1).open("a") as log:
        log.write("of the second\n")
    assert last_lines(folder.log(1), folder.log_begins[1]) == ("of the second",)


def test_the_report_of_an_early_leaver():
    told = report([raised(0, CLOSED, 1.0)], [1, 2])
    assert "xds: ranks 1, 2 had finished; every rank must join each collective" in told


def test_ranks_that_saved_and_left_are_no_failure_and_one_that_was_killed_is():
    left = [Failure(rank, 100, 143, 1.0) for rank in (0, 1)]
    assert was_preempted(left)
    assert was_preempted([*left, died(2, signal.SIGTERM, 1.0)])  # on its way out
    assert not was_preempted([died(2, signal.SIGTERM, 1.0)])
    assert not was_preempted([*left, raised(2, CLOSED, 1.0)])
    assert not was_preempted([])


def test_a_failure_survives_the_way_to_the_head():
    failure = replace(raised(2, "ValueError: x", 1.0), tail=("a", "b"), host="h1")
    assert Failure.from_dict(json.loads(json.dumps(vars(failure)))) == failure
