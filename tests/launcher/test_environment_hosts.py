"""`xds env --hostfile`: common values are printed once, differences are marked, missing hosts are named."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from xds.launcher import cli
from xds.launcher.command_line.where import Hosts
from xds.launcher.environment import Line
from xds.launcher.environment_hosts import check_slots, compare, host_names, parsed, run_all
from xds.launcher.job import Host, Job, Remote


def host(torch="2.13.0", gpus="8", address="10.0.0.1", **more):
    return [
        Line("torch", torch),
        Line("gpus", gpus),
        Line("address of eth0", address, varies=True),
        *(Line(key, *value) for key, value in more.items()),
    ]


def differences(**hosts):
    return [str(difference) for difference in compare(hosts).differences]


def test_what_is_the_same_is_common_and_addresses_do_not_count():
    compared = compare({"h1": host(address="10.0.0.1"), "h2": host(address="10.0.0.2")})
    assert [line.key for line in compared.common] == ["torch", "gpus"]
    assert not compared.differences and compared.is_one_version()


def test_the_minority_is_named():
    four = {"h1": host(), "h2": host(), "h3": host(torch="2.12.1"), "h4": host()}
    assert differences(**four) == ["3 of 4 hosts: torch 2.13.0; h3: torch 2.12.1  <- differs"]
    assert not compare(four).is_one_version()


def test_without_a_majority_every_group_is_named():
    assert differences(h1=host(gpus="8"), h2=host(gpus="4")) == [
        "h1: gpus 8  <- differs; h2: gpus 4  <- differs"
    ]
    assert compare({"h1": host(gpus="8"), "h2": host(gpus="4")}).is_one_version()


def test_a_line_that_one_host_lacks_is_a_difference():
    three = {"h1": host(nccl=("2.28",)), "h2": host(), "h3": host(nccl=("2.28",))}
    assert differences(**three) == ["2 of 3 hosts: nccl 2.28; h2: nccl (not reported)  <- differs"]


def test_a_remedy_goes_with_the_hosts_that_need_it():
    bad = ("256", "low; `ulimit -n 8192`")
    three = {"h1": host(files=("9999",)), "h2": host(files=bad), "h3": host(files=("9999",))}
    (told,) = differences(**three)
    assert "h2: files 256 (low; `ulimit -n 8192`)  <- differs" in told


def test_a_remedy_for_what_varies_is_told_of_its_host():
    full = Line("disk free", "0.1 GiB", "little; set TMPDIR", varies=True)
    compared = compare({"h1": host(), "h2": [*host(), full]})
    assert compared.warnings == (("h2", full),) and not compared.differences


def test_many_hosts_are_named_in_one_short_line():
    assert host_names([f"h{n}" for n in range(2000)]).endswith("h6, h7 and 1992 more")


@pytest.mark.parametrize(
    "output",
    ["", "Welcome!\n", "{}", "[1, 2]", '[{"key": 1, "value": "x"}]', "[" * 100_000, '{"a": 1}'],
)
def test_an_answer_that_is_none_is_not_taken_for_one(output):
    assert not parsed(output)


def test_words_of_login_scripts_do_not_spoil_the_answer():
    answer = 'module loaded\n[{"key": "torch", "value": "2", "later": 1}]\nbye\n'
    assert parsed(answer) == [Line("torch", "2")]


def test_a_hostfile_that_promises_more_gpus_than_there_are_is_told():
    few, none, fine = host(gpus="4"), host(gpus="0"), host(gpus="8")
    named_hosts = tuple(Host(name, tuple(range(8))) for name in ("few", "none", "fine", "lost"))
    asked = Hosts(Job("module", "m"), named_hosts, Remote("", "", {}), "ssh")
    answers = {"few": few, "none": none, "fine": fine}
    check_slots(asked, answers)
    (warning,) = compare(answers).warnings
    assert warning[0] == "few" and "names slot 7, but the host has 4 GPUs" in warning[1].value


def test_answers_come_by_name_with_both_streams_and_the_code():
    answers = run_all(
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


def test_what_is_out_of_time_is_killed_with_what_it_started(tmp_path):
    script = f"echo early; sleep 60 & echo $! > {tmp_path}/pid; wait"
    (answer,) = run_all({"slow": ["sh", "-c", script]}, 0.5).values()
    assert answer.code is None and answer.trouble == "did not end within 0.5 s"
    assert answer.output == "early\n"
    assert has_gone(int((tmp_path / "pid").read_text()))


def has_gone(pid):
    """Killed processes stay as zombies until init takes them."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


STUB = """\
#!/bin/sh
for word in "$@"; do case $previous in --) host=$word;; esac; previous=$word; done
echo "$*" >> {folder}/asked
case $host in
  lost) echo "ssh: Could not resolve hostname lost: Name or service not known" >&2; exit 255;;
  mute) exit 0;;
  hung) sleep 60;;
esac
for line; do :; done
{env}
exec sh -c "$line"
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A program that is called like ssh, and runs what it is given here."""
    program = tmp_path / "ssh"

    def make(env=""):
        program.write_text(STUB.format(folder=tmp_path, env=env))
        program.chmod(0o755)

    make()
    monkeypatch.setenv("XDS_SSH", str(program))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return make


def hostfile(folder, *names):
    file = folder / "hosts"
    file.write_text("".join(f"{name} slots=2\n" for name in names))
    return str(file)


def test_alike_hosts_are_told_once(tmp_path, ssh, capsys):
    words = ["env", "--hostfile", hostfile(tmp_path, "h1", "h2"), "--launcher_args=-o Foo=bar"]
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert told.startswith("-- the same on 2 hosts: h1, h2\nxds: ")
    assert told.count("\ntorch: ") == 1 and "-- different" not in told
    assert "-o Foo=bar" in (tmp_path / "asked").read_text()


def test_differences_and_silence_are_told_and_fail(tmp_path, ssh, capsys):
    ssh('test "$host" = h2 && export NCCL_DEBUG=INFO')
    file = hostfile(tmp_path, "h1", "h2", "lost", "mute", "never")
    assert cli.main(["env", "-H", file, "--exclude", "never"]) == 1
    told = capsys.readouterr().out
    assert "h2: $NCCL_DEBUG INFO  <- differs" in told and "on 2 of 4 hosts: h1, h2" in told
    assert "lost: ssh: Could not resolve hostname lost" in told and "(exit code 255" in told
    assert "mute: exit code 0, and no answer" in told
    assert "never" not in (tmp_path / "asked").read_text()


def test_a_host_that_hangs_does_not_hold_up_the_rest(tmp_path, ssh, capsys):
    before = time.monotonic()
    assert cli.main(["env", "-H", hostfile(tmp_path, "hung"), "--timeout", "0.5", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["not_reached"] == {
        "hung": "did not end within 0.5 s"
    }
    assert time.monotonic() - before < 30  # not its 60 s


def test_an_interrupt_ends_it_without_a_word(tmp_path, ssh):
    words = [sys.executable, "-m", "xds.launcher.cli", "env", "-H", hostfile(tmp_path, "hung", "h")]
    asking = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    asking.send_signal(signal.SIGINT)
    assert asking.communicate(timeout=60) == (b"", b"") and asking.returncode == 130


def test_json_holds_every_host_and_what_differs(tmp_path, ssh, capsys):
    ssh(f'test "$host" = h2 && export PYTHONPATH={fake_torch(tmp_path)}')
    assert cli.main(["env", "-H", hostfile(tmp_path, "h1", "h2"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told["hosts"]) == {"h1", "h2"} and told["not_reached"] == {}
    values = {tuple(group["hosts"]): group["value"] for group in told["differences"]["torch"]}
    assert values[("h2",)].startswith("cannot be imported, ImportError: broken")


def fake_torch(folder):
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('broken')\n")
    return folder


@pytest.mark.parametrize(
    "words, told",
    [
        (["--include", "h1"], "--hostfile"),
        (["--hostfile", "/nowhere"], "/nowhere"),
        (["--all"], "unknown option --all"),
        (["--launcher", "local", "all"], "all: is not an option"),
        (["--hostfile", "/nowhere", "--timeout", "0"], "above 0"),
    ],
)
def test_wrong_use_is_told(words, told, capsys):
    assert cli.main(["env", *words]) == 2
    assert told in capsys.readouterr().err


def test_options_of_a_run_on_this_machine_tell_of_this_machine(capsys):
    assert cli.main(["env", "--nproc-per-node", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["key"] == "xds"


def test_a_launcher_that_starts_all_hosts_at_once_is_refused(tmp_path, monkeypatch, capsys):
    stub = tmp_path / "pdsh"
    stub.write_text("#!/bin/sh\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["env", "--hostfile", hostfile(tmp_path, "h1", "h2"), "--launcher", "pdsh"]
    assert cli.main(words) == 2
    assert "--launcher = pdsh" in capsys.readouterr().err


def test_a_missing_ssh_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDS_SSH", os.fspath(tmp_path / "nowhere"))
    assert cli.main(["env", "--hostfile", hostfile(tmp_path, "h1")]) == 2
    assert "XDS_SSH" in capsys.readouterr().err
