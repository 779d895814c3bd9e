"""`xds completion`: scripts with which shells complete commands, options and their values."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from xds.launcher.cli import _SUBCOMMANDS, main
from xds.launcher.command_line.completion import commands
from xds.launcher.command_line.option_table import OPTIONS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_the_usage_text_has_every_command() -> None:
    assert sorted(name for name, _, _ in commands()) == sorted(_SUBCOMMANDS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_what_xds_would_read(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    wanted = {
        ("xds", "che"): ["check", "checkpoint"],
        ("xds", "check"): ["check", "checkpoint"],
        ("xds", "checkpoint", "v"): ["verify"],
        ("xds", "--log-l"): ["--log-level"],
        ("xds", "--log-level", "w"): ["warning"],
        ("xds", "--log-dir", "--log-l"): [],  # the value of an option
        ("xds", "--nproc-per-node", "2", "--bac"): ["--backend"],
        ("xds", "train.py", "--bac"): [],  # of the script
    }
    for words in wanted:
        text += f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _xds\n"
        text += 'echo "${COMPREPLY[*]}"\n'
    command = ["bash", "--norc", "-c", text]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in out.splitlines()] == list(wanted.values())


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for option in OPTIONS:
        name = option.name if shell == "zsh" else f" -l {option.name[2:]} "
        assert (name in text) == bool(option.help)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
