"""Each key that docs/config.md calls supported is read by some code, so it can have an effect."""

import ast
from collections.abc import Iterator
from pathlib import Path

import xds
from xds.engine.config.config import Config
from xds.utils.schema.section import Section, subsection

ROOT = Path(xds.__file__).resolve().parent
FOLDERS = ("engine", "zero", "offload", "pipe", "tensor", "compression", "ops", "deepspeed")


def supported(section: type[Section], path: str = "") -> Iterator[tuple[str, str]]:
    for name in section.model_fields.keys() - section.results:
        yield path + name, name
        inner = subsection(section, name)
        if inner is not None:
            yield from supported(inner, f"{path}{name}.")


def read_names() -> set[str]:
    found = set()
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def test_every_supported_key_is_read() -> None:
    read = read_names()
    assert not [path for path, name in supported(Config) if name not in read]
