"""Arguments arrive unchanged on every host through every backend, and no part of them is executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_stubs import calls, make_stub, with_stub

from xds.launcher.job import Host, Remote
from xds.launcher.remote.backends import (
    BACKENDS,
    AllAtOnce,
    PerHost,
    Slurm,
    backend_named,
    node_index,
    shell_argv,
    shell_line,
)
from xds.utils.errors import UsageError

HOSTILE = (
    *("a b¦'q'¦\"¦; touch evil¦$(touch evil)¦`touch evil`¦| touch evil¦&& touch evil¦-x¦--").split(
        "¦"
    ),
    *("%n %h %%¦!!¦\\n\\¦*¦~¦¦#¦:¦$HOME¦${PATH}¦a=b¦\\0041¦%s%d¦{a,b}¦[ab]¦<x¦>evil¦'¦\\'").split(
        "¦"
    ),
    *("new\nline\n", "ünï\u2028\U0001f600", "\t\r\x01\x7f"),
)
# tells its arguments and what surrounds it, in one write
TELL = (
    "import json, os, sys;"
    " said = [sys.argv[1:], os.getcwd(), os.environ.get('PYTHONPATH'), os.environ.get('MARK'),"
    " {k: v for k, v in os.environ.items() if 'RANK' in k or 'PROC' in k}];"
    " sys.stdout.write(json.dumps(said) + chr(10))"
)
# prints its arguments, each with a NUL behind it
EACH = 'for word; do printf "%s\\0" "$word"; done'
SHELLS = ("sh", "dash", "bash", "csh", "tcsh", "fish", "zsh", "ksh")
A, B = Host("127.0.0.2", (0,)), Host("127.0.0.3", (0, 1))


def words_of(*args: str) -> list[str]:
    return ["/bin/sh", "-c", EACH, "sh", *args]


def heard(output: bytes) -> list[str]:
    return output.decode().split("\0")[:-1]


def test_every_login_shell_hands_the_words_over_literally(tmp_path: Path) -> None:
    line = shell_line(Remote(str(tmp_path), "python", {}), words_of(*HOSTILE))
    for shell in filter(shutil.which, SHELLS):
        done = subprocess.run([shell, "-c", line], cwd=tmp_path, capture_output=True)
        assert heard(done.stdout) == list(HOSTILE), (shell, done.stderr)
    assert not list(tmp_path.iterdir())


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
    ),
    st.sampled_from(["", "venv; touch evil"]),
)
def test_any_word_survives_the_shells_between(
    tmp_path: Path, words: list[str], venv_script: str
) -> None:
    (tmp_path / "venv; touch evil").write_text("true\n")
    remote = Remote(str(tmp_path), "python", {}, venv_script=venv_script)
    joined = ["/bin/sh", "-c", shell_line(remote, words_of(*words))]
    for command in (joined, shell_argv(remote, words_of(*words))):
        done = subprocess.run(command, capture_output=True)
        assert heard(done.stdout) == words, done.stderr
    assert not (tmp_path / "evil").exists()


def test_names_of_folders_and_variables_values_are_literal_too(tmp_path: Path) -> None:
    folder = tmp_path / "a '$(touch evil)' \"; b\n"
    folder.mkdir()
    remote = Remote(str(folder), "python", {"PYTHONPATH": "/x y'$(touch evil)`", "OTHER": "secret"})
    words = [sys.executable, "-c", TELL]
    for command in (["sh", "-c", shell_line(remote, words)], shell_argv(remote, words)):
        assert "secret" not in " ".join(command), (
            "only what Python needs at its start is seen by ps"
        )
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
        said = json.loads(done.stdout)
        assert said[1:3] == [str(folder), "/x y'$(touch evil)`"]
    assert not (tmp_path / "evil").exists() and not list(folder.iterdir())


def test_the_interpreter_is_the_process_that_was_started_and_finds_the_standard_modules(
    tmp_path: Path,
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('hidden')")
    words = [sys.executable, "-c", "import os; print(os.getpid())"]
    line = shell_line(Remote(str(tmp_path), "python", {}), words)
    process = subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].strip() == str(process.pid)
    if sys.version_info >= (3, 11):  # Python 3.10 has no PYTHONSAFEPATH
        words = [sys.executable, "-m", "json.tool", "--help"]
        line = shell_line(Remote(str(tmp_path), "python", {}), words)
        subprocess.run(["sh", "-c", line], check=True, capture_output=True)


def test_the_venv_script_is_sourced_by_bash_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "my env").write_text("MARK=('from it' x)\nexport MARK\nsource /dev/null\n")
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    remote = Remote(str(tmp_path), "python", {}, venv_script="my env")
    words = ["/bin/sh", "-c", "echo $0 done", "it's"]
    for command in (["sh", "-c", shell_line(remote, words)], shell_argv(remote, words)):
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("it's done\n", 0), done.stderr
    line = shell_line(Remote("/", "python", {}, venv_script="/nowhere/it's"), words)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--venv_script /nowhere/it's: no such file here" in done.stderr


def test_ssh_is_called_so_that_it_never_asks_and_the_user_s_settings_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ssh = BACKENDS["ssh"]
    assert isinstance(ssh, PerHost)
    remote = Remote("/w", "python", {}, ssh_port=2222, launcher_args=("-o", "ConnectTimeout=99"))
    command = ssh.command(Host("me@host-1", (0,)), remote, ["true"])
    assert command[:3] == ["ssh", "-o", "ConnectTimeout=99"], "of two settings ssh takes the first"
    assert command[-3:-1] == ["--", "me@host-1"]
    assert {"-T", "BatchMode=yes", "LogLevel=ERROR"} <= set(command)
    assert command[command.index("-p") + 1] == "2222"
    monkeypatch.setenv("XDS_SSH", "/my/ssh")
    assert ssh.command(A, remote, ["true"])[0] == "/my/ssh"


def command_for(name: str, *names: str) -> list[str]:
    """What starts `true` on these hosts."""
    backend, hosts, remote = (
        BACKENDS[name],
        [Host(one, (0,)) for one in names],
        Remote("/w", "python", {}),
    )
    if isinstance(backend, PerHost):
        return backend.command(hosts[-1], remote, ["true"])
    assert isinstance(backend, AllAtOnce)
    return backend.command(hosts, remote, ["true"])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_that_a_shell_an_option_or_a_list_could_be_made_of_is_refused(name: str) -> None:
    for host in (
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "$(x)",
        "`x`",
        "a\nb",
        "a'b",
        'a"b',
        "a|b",
        "",
        "a\\b",
    ):
        with pytest.raises(UsageError, match="not a valid host name"):
            command_for(name, "127.0.0.2", host)
    if name != "ssh":
        with pytest.raises(UsageError, match="not a valid host name"):
            command_for(name, "a,b")
    if name not in ("ssh", "pdsh"):
        said = "user@host works with --launcher ssh and pdsh"
        with pytest.raises(UsageError, match=said):
            command_for(name, "me@10.0.0.2")


def run_through(
    name: str, program: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[Any]], dict[str, Any]]:
    """What the processes on two hosts said, and what the stub was given."""
    record = make_stub(folder, program)
    monkeypatch.setenv("PATH", with_stub(folder)["PATH"])
    backend = BACKENDS[name]
    assert isinstance(backend, AllAtOnce)
    backend.check()
    remote = Remote(str(folder), "python", {"MARK": "a, b=$c", "PYTHONPATH": "/p q"})
    command = backend.command([A, B], remote, [sys.executable, "-c", TELL, *HOSTILE])
    environ = {**os.environ, **backend.environment(remote)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert not (folder / "evil").exists()
    return [json.loads(line) for line in done.stdout.splitlines()], calls(record)[-1]


@pytest.mark.parametrize(
    "name, program, key",
    [
        ("slurm", "srun", "SLURM_PROCID"),
        ("openmpi", "mpirun", "OMPI_COMM_WORLD_RANK"),
        ("mpich", "mpiexec.hydra", "PMI_RANK"),
    ],
)
def test_the_words_reach_both_hosts_literally(
    name: str, program: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MARK", raising=False)
    said, given = run_through(name, program, tmp_path, monkeypatch)
    assert [one[:3] for one in said] == [[list(HOSTILE), str(tmp_path), "/p q"]] * 2
    if name != "openmpi":
        assert {one[3] for one in said} == {"a, b=$c"}
        assert "a, b=$c" not in given["argv"], "values are not where everybody can read them"
    assert sorted(node_index(one[4]) or 0 for one in said) == [0, 1]
    assert all(one[4].get(key) for one in said)


def check_pdsh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_stub(folder, "ssh")
    monkeypatch.setenv("PATH", with_stub(folder)["PATH"])
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o Mine=1")
    pdsh = BACKENDS["pdsh"]
    assert isinstance(pdsh, AllAtOnce)
    remote = Remote(str(folder), "python", {}, ssh_port=77)
    command = pdsh.command([B, A], remote, [sys.executable, "-c", TELL, *HOSTILE])
    assert command[command.index("-f") + 1] == "2", "all hosts at once: they wait for one another"
    environ = {**os.environ, **pdsh.environment(remote)}
    assert environ["PDSH_SSH_ARGS_APPEND"].startswith("-o Mine=1 -T -p 77 -o BatchMode=yes")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd="/")
    said = [json.loads(line)[0] for line in done.stdout.splitlines()]
    assert sorted(said, key=str) == [[*HOSTILE, "--index", place] for place in "01"], done.stderr
    assert not (folder / "evil").exists()


def test_pdsh_as_its_manual_says_hands_over_words_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stub(tmp_path, "pdsh")
    check_pdsh(tmp_path, monkeypatch)


@pytest.mark.skipif(not shutil.which("pdsh"), reason="no pdsh here")
def test_the_real_pdsh_hands_over_words_places_and_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_pdsh(tmp_path, monkeypatch)
    given = calls(tmp_path / "ssh.jsonl")
    assert all("Mine=1" in call["argv"] and "77" in call["argv"] for call in given)  # type: ignore[operator]
    pdsh = BACKENDS["pdsh"]
    assert isinstance(pdsh, AllAtOnce)
    command = pdsh.command([A, B], Remote("/", "python", {}), ["/bin/sh", "-c", "exit 7"])
    assert subprocess.run(command, capture_output=True).returncode == 7


def is_real_openmpi() -> bool:
    if not shutil.which("mpirun"):
        return False
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return "Open MPI" in done.stdout


@pytest.mark.skipif(not is_real_openmpi(), reason="no mpirun of Open MPI here")
def test_the_real_mpirun_hands_over_words_and_exit_codes(tmp_path: Path) -> None:
    agent = tmp_path / "agent"  # stands for ssh; each host's daemon needs a folder of its own
    agent.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'TMPDIR={tmp_path}/$1; export TMPDIR; mkdir -p "$TMPDIR"; shift\nexec /bin/sh -c "$*"\n'
    )
    agent.chmod(0o755)
    openmpi = BACKENDS["openmpi"]
    assert isinstance(openmpi, AllAtOnce)
    openmpi.check()
    more = ("--mca", "plm_rsh_agent", str(agent), "--mca", "plm", "rsh")
    remote = Remote(str(tmp_path), "python", {}, launcher_args=more)
    code = f"{TELL}; sys.exit(7 * int(os.environ['OMPI_COMM_WORLD_RANK']))"
    command = openmpi.command([A, B], remote, [sys.executable, "-c", code, *HOSTILE])
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one[:2] for one in said] == [[list(HOSTILE), str(tmp_path)]] * 2
    assert sorted(node_index(one[4]) or 0 for one in said) == [0, 1]
    assert not (tmp_path / "evil").exists()


def test_a_process_s_place_is_mpi_s_before_that_of_slurm_s_step_around_it() -> None:
    assert node_index({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "3"}) == 3
    assert node_index({"SLURM_PROCID": "2"}) == 2
    assert node_index({"PMIX_RANK": "1"}) == 1
    assert node_index({"PMI_RANK": "x", "HOME": "/"}) is None


def test_the_user_s_options_of_slurm_come_last() -> None:
    remote = Remote("/w", "python", {"A": "1"}, launcher_args=("-p", "gpu", "--export=ALL"))
    slurm = BACKENDS["slurm"]
    assert isinstance(slurm, Slurm)
    hosts = [Host("a", (0,)), Host("b", (0,))]
    command = slurm.command(hosts, remote, ["xds", "train.py", "$(x)"])
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(command)
    first = command.index("/bin/sh")
    assert command[first - 3 : first] == ["-p", "gpu", "--export=ALL"], (
        "of two settings srun takes the last"
    )


def test_a_backend_that_cannot_work_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("XDS_SSH", raising=False)
    for name, backend in BACKENDS.items():
        with pytest.raises(
            UsageError, match=f"--launcher = {name}: no program '{backend.program}' here;"
        ):
            backend_named(name)
    with pytest.raises(UsageError, match="must be one of ssh, pdsh, slurm"):
        backend_named("rsh")
    with pytest.raises(UsageError, match="mvapich: its mpirun_rsh is not supported"):
        backend_named("mvapich")
    make_stub(tmp_path, "mpirun", version="HYDRA build details:")
    with pytest.raises(UsageError, match="belongs to another MPI; set --launcher mpich"):
        backend_named("openmpi")
    make_stub(tmp_path, "mpiexec.hydra", version="Intel(R) MPI Library")
    assert backend_named("impi").name == "impi"
    with pytest.raises(UsageError, match="belongs to another MPI; set --launcher impi"):
        backend_named("mpich")


def test_a_variable_that_no_shell_can_set_and_a_nul_are_refused() -> None:
    remote = Remote("/w", "python", {"BASH_FUNC_x%%": "() { :; }"})
    slurm = BACKENDS["slurm"]
    assert isinstance(slurm, Slurm)
    with pytest.raises(UsageError, match="BASH_FUNC_x%%"):
        slurm.command([A], remote, ["true"])
    for make in (shell_line, shell_argv):
        with pytest.raises(UsageError, match="NUL"):
            make(Remote("/w", "python", {}), ["a\0b"])  # type: ignore[operator]
