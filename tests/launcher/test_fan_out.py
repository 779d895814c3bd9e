"""Many commands in parallel: bounded, with time limits, and no process remains."""

import os
import signal
import subprocess
import sys
import time

from xds.launcher.remote.fan_out import fan_out


def test_answers_come_by_name_with_both_streams_and_the_code():
    answers = fan_out(
        {
            "a": ["sh", "-c", "echo out; echo err >&2; exit 3"],
            "b": ["sh", "-c", "kill -9 $$"],
            "c": ["/nowhere/ssh"],
        },
        20,
    )
    assert list(answers) == ["a", "b", "c"]
    assert (answers["a"].code, answers["a"].output, answers["a"].errors) == (3, "out\n", "err\n")
    assert answers["b"].code == -9
    assert answers["c"].code is None and answers["c"].trouble.startswith("cannot start /nowhere")


def test_no_more_run_at_once_than_allowed(tmp_path):
    count = f"mkdir {tmp_path}/$1; ls {tmp_path} | wc -l; sleep 0.05; rmdir {tmp_path}/$1"
    commands = {str(n): ["sh", "-c", count, "sh", str(n)] for n in range(12)}
    answers = fan_out(commands, 20, at_once=3)
    assert max(int(answer.output) for answer in answers.values()) <= 3


def test_what_is_out_of_time_is_killed_with_what_it_started(tmp_path):
    script = f"echo early; sleep 60 & echo $! > {tmp_path}/pid; wait"
    (answer,) = fan_out({"slow": ["sh", "-c", script]}, 0.5).values()
    assert answer.code is None and answer.trouble == "did not end within 0.5 s"
    assert answer.output == "early\n"
    assert has_gone(int((tmp_path / "pid").read_text()))


def test_an_interrupt_ends_what_runs(tmp_path):
    program = (
        "from xds.launcher.remote.fan_out import fan_out\n"
        f"fan_out({{'a': ['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60']}}, 60)\n"
    )
    head = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    file = tmp_path / "pid"
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    head.send_signal(signal.SIGINT)
    head.wait(20)
    assert has_gone(int(file.read_text()))


def test_hundreds_of_hosts_are_asked_and_none_is_lost():
    answers = fan_out({str(n): ["sh", "-c", f"echo {n}"] for n in range(200)}, 60)
    assert [int(answer.output) for answer in answers.values()] == list(range(200))


def has_gone(pid):
    """Killed processes stay as zombies until init takes them."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False
