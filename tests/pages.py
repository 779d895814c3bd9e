"""Test helper: the blocks and the commands of the pages.

A block's language says what it is: python runs, bash is commands (as is a block without a language that begins
with a program), json is a config, text is output or a drawing. Commands in the
prose are those in backticks that begin with a program.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "tests/README.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
LANGUAGES = ("python", "bash", "json", "yaml", "diff", "text")
PROGRAMS = (
    *("xds", "python", "python3", "pip", "pytest", "ruff", "mypy", "mkdocs"),
    *("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "diff", "source", "nvidia-smi"),
    "cd",
)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"\n\n    (?! *[-*\d])(\S.*)")
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_VARIABLE = re.compile(r"[A-Z_]+=")


class Block(NamedTuple):
    page: str
    language: str
    text: str


class Command(NamedTuple):
    """`words` without variables, redirections and comments. folder: where a `cd` of the page leads."""

    page: str
    line: str
    words: tuple[str, ...]
    folder: str = ""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    found = []
    for fence in _FENCE.finditer(page.read_text()):
        is_command = fence[3].startswith(tuple(f"{name} " for name in PROGRAMS))
        found.append(Block(name_of(page), fence[2] or "bash" * is_command, fence[3]))
    return found


def prose_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def indented_blocks(page: Path) -> list[str]:
    """The first lines of code that only its indentation shows, which have no language."""
    return [found for found in _INDENTED.findall(prose_of(page)) if page.name != "CHANGELOG.md"]


def blocks(page: Path, language: str) -> list[str]:
    return [block.text for block in blocks_of(page) if block.language == language]


def inline_code(page: Path, tables: bool = True) -> list[str]:
    text = prose_of(page)
    if not tables:
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return [" ".join(code.split()) for code in _INLINE.findall(text)]


def commands_of(page: Path) -> list[Command]:
    found, folder = [], ""
    for block in blocks_of(page):
        if block.language == "bash":
            text = block.text.replace("\\\n", " ")
            lines = [line for line in text.splitlines() if line and not line.startswith("#")]
            for line in lines:
                if line.startswith("cd "):
                    folder = line.split()[1]
                else:
                    found += _read(page, line, folder)
    for code in inline_code(page) if page.name != "CHANGELOG.md" else []:
        is_command = any(code.startswith(f"{name} ") for name in PROGRAMS)
        if is_command or (_VARIABLE.match(code) and any(f" {name} " in code for name in PROGRAMS)):
            found += _read(page, code, "")
    return found


def _read(page: Path, line: str, folder: str) -> list[Command]:
    """The commands of a line: `a && b` are two, of `a | b` the first counts."""
    found = []
    for part in re.split(r" && ", line):
        words = shlex.split(part, comments=True)
        while words and (_VARIABLE.match(words[0]) or words[0] == "exec"):
            words.pop(0)
        for mark in ("|", ">"):
            words = words[: words.index(mark)] if mark in words else words
        if words:
            found.append(Command(name_of(page), part.strip(), tuple(words), folder))
    return found
