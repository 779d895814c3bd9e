"""Generates docs/options.md from the option table, on standard output."""

from __future__ import annotations

import argparse

from .. import tune
from .option_table import GROUPS, OPTIONS, Option

_HEAD = """\
# The options of `xds`

This page is generated from launcher/command_line/option_table.py and launcher/tune.py.
`xds [options] script.py [arguments]` takes the options of `deepspeed` and of `torchrun`, and a few of its own.

- A long option may be written with dashes or underscores. Its value is the next argument, or follows `=`.
- Options end at the script (or at `--`). All arguments after it are passed to the script.
- Flags take precedence over the environment.
- Commands have options of their own: see [`xds tune`](#xds-tune) below, [report.md](report.md) and
  [plan.md](plan.md).
- `eval "$(xds completion bash)"` in `~/.bashrc` lets the shell complete them. zsh and fish have one too.
- If an option marked † is not given, torchrun's variable `PET_<NAME>` is used.

Where a command line runs is decided in this order:

1. `--launcher local`: on this machine.
2. `--no-ssh`, or torchrun's rendezvous (`--node-rank`, `--rdzv-*`, `--standalone`, `--local-addr`): this
   machine's part.
3. `--hostfile`, or /job/hostfile if it exists, `--launcher`, `--force-multi`: on those hosts, over ssh or
   the given launcher. A hostfile that names only this machine runs here.
4. torchrun's variables (`PET_*`), a cluster that starts one xds on each machine (Kubernetes, `srun`, `mpirun`):
   this machine's part.
5. A Slurm allocation with several machines, outside of a step: on all of them, through `srun`.
6. On this machine.

Intended differences from `deepspeed`:

- A missing hostfile that was named is an error, not a run on this machine.
- A hostfile with one other machine runs on that machine.
- `--num_gpus` and `--num_nodes` above the numbers in the hostfile are errors.
- `--local_rank=N` is never added to the script's arguments, because a script that does not expect it would
  fail. The number is in `LOCAL_RANK`.
- ssh is the default launcher. pdsh is not needed.
- The port is a free one unless it is given.

Differences from `torchrun`:

- `--nproc-per-node` is `auto` unless given.
- Several machines without a rendezvous endpoint are an error; torchrun waits.
- The ranks' files are in `--log-dir` itself.
- `OMP_NUM_THREADS` is cores divided by ranks.
"""


def page() -> str:
    """The text of docs/options.md."""
    parts = [_HEAD]
    for group in GROUPS:
        rows = [option for option in OPTIONS if option.group == group and option.help]
        parts.append(_table(group.capitalize(), "meaning", [(each, each.help) for each in rows]))
    suffix = " (xds logs this)"
    silent = [
        (each, each.reason or each.note + suffix) for each in OPTIONS if each.reason or each.note
    ]
    parts.append(_table("Accepted without effect", "because", silent))
    refused = [(each, each.refusal) for each in OPTIONS if each.refusal]
    parts.append(_table("Refused", "because", refused))
    parts.append(_command_table("xds tune", tune.parser()))
    return "\n".join(parts)


def _command_table(name: str, parser: argparse.ArgumentParser) -> str:
    """The options of a command, from its parser."""
    lines = [f"## `{name}`", "", "| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.dest != "help":
            words = [", ".join(action.option_strings) or action.dest, str(action.metavar or "")]
            lines.append(f"| `{_cell(' '.join(words).strip())}` | {_cell(action.help or '')} |")
    return "\n".join([*lines, ""])


def _table(title: str, column: str, rows: list[tuple[Option, str]]) -> str:
    lines = [f"## {title}", "", f"| option | also | {column} |", "|---|---|---|"]
    lines += [f"| {_name(option)} | {_also(option)} | {_cell(text)} |" for option, text in rows]
    return "\n".join([*lines, ""])


def _name(option: Option) -> str:
    return f"`{_cell(f'{option.name} {option.value}'.strip())}`" + " †" * option.is_torchrun


def _also(option: Option) -> str:
    return ", ".join(f"`{alias}`" for alias in option.aliases)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("][", "]\\[")  # "][" would be a link


if __name__ == "__main__":
    print(page(), end="")
