"""`xds completion`: prints a script with which a shell completes `xds`, made from the option table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .option_table import OPTIONS, Option
from .options import USAGE, Parser

_COMMAND = re.compile(r"^ +xds ([a-z]+)(?: ([a-z|]+)(?= ))?.*?   +(.*)$", re.MULTILINE)

_BASH = """\
_xds() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} word number is_value=
    COMPREPLY=()
    case $COMP_CWORD,${{COMP_WORDS[1]}} in
{actions}
    esac
    for ((number = 1; number < COMP_CWORD; number++)); do
        word=${{COMP_WORDS[number]}}
        if [[ $is_value ]]; then is_value=; continue; fi
        case $word in
            {valued}) is_value=$word ;;
            -*) ;;
            *) return ;;  # the script, or a command: its arguments are its own
        esac
    done
    case $is_value in
{choices}
        ?*) return ;;
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "{options}" -- "$current"))
    elif ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
    fi
}}
complete -o default -F _xds xds
"""

_ZSH = """\
#compdef xds
_xds() {{
    local -a commands=(
{commands}
    )
    case $words[2] in
{actions}
    esac
    if ((CURRENT > 2)) && (($+commands[(r)$words[2]:*])); then
        _files
        return
    fi
    _arguments -S \\
{options}
        '1: :{{_describe command commands; _files}}' \\
        '*: :_files'
}}
compdef _xds xds
"""


def main(argv: Sequence[str]) -> int:
    """Print the script for the shell that `argv` names."""
    parser = Parser(
        prog="xds completion",
        description="Print a script with which a shell completes xds.",
        epilog='bash: eval "$(xds completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; '
        "fish: xds completion fish > ~/.config/fish/completions/xds.fish",
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(list(argv)).shell](), end="")
    return 0


def commands() -> list[tuple[str, list[str], str]]:
    """(name, its first words, help) of each subcommand, from the usage text."""
    found = _COMMAND.findall(USAGE)
    return [(name, words.split("|") if words else [], text) for name, words, text in found]


def _options() -> list[Option]:
    return [option for option in OPTIONS if option.help]


def _names(option: Option) -> list[str]:
    return [option.name, *option.aliases]


def _bash() -> str:
    actions = [
        f'        2,{name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current")); return ;;'
        for name, words, _ in commands()
        if words
    ]
    chosen = [option for option in _options() if option.choices]
    return _BASH.format(
        actions="\n".join(actions),
        valued="|".join(name for option in _options() if option.value for name in _names(option)),
        choices="\n".join(
            f"        {'|'.join(_names(option))}) "
            f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current")); return ;;'
            for option in chosen
        ),
        options=" ".join(name for option in _options() for name in _names(option)),
        commands=" ".join(name for name, _, _ in commands()),
    )


def _zsh() -> str:
    listed = commands()
    options = []
    for option in _options():
        words = f"({' '.join(option.choices)})" if option.choices else "_files"
        value = f":{option.value.replace(':', ' ')}:{words}" if option.value else ""
        text = re.sub(r"([\[\]:])", r"\\\1", option.help)
        options += [f"        {_quoted(f'{name}[{text}]{value}')} \\" for name in _names(option)]
    return _ZSH.format(
        commands="\n".join(f"        {_quoted(f'{name}:{text}')}" for name, _, text in listed),
        actions="\n".join(
            f"        {name}) ((CURRENT == 3)) && {{ compadd {' '.join(words)}; return; }} ;;"
            for name, words, _ in listed
            if words
        ),
        options="\n".join(options),
    )


def _fish() -> str:
    first, lines = "-n __fish_use_subcommand", []
    for name, words, text in commands():
        lines.append(f"complete -c xds {first} -a {name} -d {_quoted(text)}")
        if words:
            seen = f'-n "__fish_seen_subcommand_from {name}"'
            lines.append(f"complete -c xds {seen} -a {_quoted(' '.join(words))}")
    for option in _options():
        names = [
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            for name in _names(option)
        ]
        value = f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r"
        lines.append(
            f"complete -c xds {first} {' '.join(names)}{value if option.value else ''} "
            f"-d {_quoted(option.help)}"
        )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """The text as one word of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

__all__ = ["commands", "main"]
