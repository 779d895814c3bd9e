"""Writes names.json, the table of DeepSpeed's modules and names, from an installed DeepSpeed.

    python deepspeed/stand_in/write_names.py > deepspeed/stand_in/names.json

Only names and plain values are read: no code and no text. The sources are parsed; modules that can be imported
on this machine give the values of their constants.

The table is {module: {kind: names}}, without "deepspeed." before a module. Names are words of one string.
The kinds are

    class, function, value              something without a value that JSON can hold
    raises     {"ValueError": names}    exception classes, by the built-in class that each derives from
    from       {module: names}          names of another module of DeepSpeed; "Name=Other": of its name Other
    python     {package: names}         names of another package; "Name=": the package itself
    module     {name: module}           a module of DeepSpeed
    enum       {name: [bases, members]} an enumeration: "str" or "int" or nothing, and its members
    is         {name: value}            a constant
"""

from __future__ import annotations

import ast
import builtins
import enum
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = "deepspeed"
MOST_LETTERS = 200  # of a constant; longer ones are texts, not keys
Names = dict[str, Any]


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    found = importlib.util.find_spec(ROOT)
    if found is None or not found.submodule_search_locations:
        raise SystemExit("needs an installed DeepSpeed; pip install deepspeed==0.19.8")
    folder = Path(found.submodule_search_locations[0])
    output = sys.stdout
    sys.stdout = sys.stderr  # DeepSpeed logs while it is imported
    sources = dict(_sources(folder))
    table = {module: _names(module, path) for module, path in sources.items()}
    for module in table:
        _resolve_stars(module, table, set())
    for module, names in table.items():
        _add_values(module, names, table)
    grouped = {module: _grouped(names) for module, names in table.items()}
    lines = [
        f"{json.dumps(module)}: {json.dumps(grouped[module], sort_keys=True)}"
        for module in sorted(grouped)
    ]
    output.write("{\n" + ",\n".join(lines) + "\n}")
    output.write("\n")


def _sources(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if all(part.isidentifier() for part in parts):
            yield ".".join(parts), path


def _names(module: str, path: Path) -> Names:
    tree = ast.parse(path.read_text())
    names: Names = {}
    for node in _statements(tree.body):
        _read(node, module, path.name == "__init__.py", names)
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those inside if, try and with."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, None)
            if isinstance(inner, list) and not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                yield from _statements(inner)


def _read(node: ast.stmt, module: str, is_package: bool, names: Names) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names[node.name] = "function"
    elif isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        names[node.name] = {"class": bases}
    elif isinstance(node, ast.Import):
        for alias in node.names:
            target = alias.name if alias.asname else alias.name.partition(".")[0]
            bound = alias.asname or target
            names[bound] = (
                _module(target) if target.partition(".")[0] == ROOT else f"python {target}"
            )
    elif isinstance(node, ast.ImportFrom):
        _read_from(node, module, is_package, names)
    else:
        for target in _targets(node):
            names.setdefault(target, "value")


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _read_from(node: ast.ImportFrom, module: str, is_package: bool, names: Names) -> None:
    source = node.module or ""
    if node.level:
        parts = [ROOT, *filter(None, module.split("."))]
        kept = parts[: len(parts) - node.level + is_package]
        source = ".".join([*kept, *filter(None, [source])])
    is_own = source.partition(".")[0] == ROOT
    inside = source.removeprefix(ROOT).lstrip(".")
    for alias in node.names:
        bound = alias.asname or alias.name
        if alias.name == "*":
            names.setdefault("*", []).append(inside if is_own else "")
        elif not is_own:
            names[bound] = f"python {source} {alias.name}"
        else:
            names[bound] = f"from {inside}" + ("" if bound == alias.name else f" as {alias.name}")


def _module(name: str) -> str:
    return f"module {name.removeprefix(ROOT).lstrip('.')}".rstrip()


def _resolve_stars(module: str, table: dict[str, Names], busy: set[str]) -> None:
    names = table[module]
    for source in names.pop("*", []):
        if source not in table or source in busy:
            continue
        _resolve_stars(source, table, busy | {module})
        for name in table[source]:
            if not name.startswith("_"):
                names.setdefault(name, f"from {source}")


def _add_values(module: str, names: Names, table: dict[str, Names]) -> None:
    """Replace modules' own names by what the module says they are, where it can be imported."""
    try:
        found: Any = importlib.import_module(".".join(filter(None, [ROOT, module])))
    except BaseException as error:  # an absent compiler, device or package
        print(f"{module}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
        found = None
    for name, what in list(names.items()):
        value = getattr(found, name, None)
        if isinstance(what, dict):
            names[name] = _class(value, what["class"], table)
        elif what == "value" and found is not None and hasattr(found, name):
            names[name] = _constant(value)
        elif isinstance(what, str) and what.startswith("from "):
            source, _, other = what.removeprefix("from ").partition(" as ")
            inner = f"{source}.{other or name}".lstrip(".")
            if inner in table and (other or name) not in table.get(source, {}):
                names[name] = f"module {inner}"


def _class(value: Any, bases: list[str], table: dict[str, Names]) -> Any:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        members = {member.name: member.value for member in value}
        if _is_plain(members):
            others = [base.__name__ for base in value.__bases__ if base in (str, int)]
            if issubclass(value, enum.IntEnum):
                others = ["int"]
            return ["enum", others, members]
    if isinstance(value, type) and issubclass(value, BaseException):
        base = next(one for one in value.__mro__ if one.__module__ == "builtins")
        return f"raises {base.__name__}"
    for name in bases:
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return f"raises {name}"
    return "class"


def _constant(value: Any) -> Any:
    if isinstance(value, type):
        return "class"
    if _is_plain(value) and len(json.dumps(value)) <= MOST_LETTERS:
        return ["is", value]
    return "function" if callable(value) else "value"


def _grouped(names: Names) -> dict[str, Any]:
    """The names of a module by their kinds. Private names of other modules are left out."""
    words: dict[str, list[str]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        what = names[name]
        kind, _, rest = what.partition(" ") if isinstance(what, str) else (what[0], "", "")
        if name.startswith("_") and kind in ("from", "python", "module", "is"):
            continue
        if kind in ("class", "function", "value"):
            words.setdefault(kind, []).append(name)
        elif kind in ("enum", "is"):
            groups.setdefault(kind, {})[name] = what[1] if kind == "is" else what[1:]
        elif kind == "module":
            groups.setdefault(kind, {})[name] = rest
        else:
            source, word = _source_of(kind, rest, name)
            groups.setdefault(kind, {}).setdefault(source, []).append(word)
    for kind in ("raises", "from", "python"):
        if kind in groups:
            groups[kind] = {source: " ".join(found) for source, found in groups[kind].items()}
    return {**groups, **{kind: " ".join(found) for kind, found in words.items()}}


def _source_of(kind: str, rest: str, name: str) -> tuple[str, str]:
    if kind == "raises":
        return rest, name
    if kind == "from":
        source, _, other = rest.partition(" as ")
    else:
        source, _, other = rest.partition(" ")
        if not other:
            return source, f"{name}="
        other = "" if other == name else other
    return source, f"{name}={other}" if other else name


def _is_plain(value: Any) -> bool:
    """JSON gives the same value back. Paths of this machine are left out."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return False
    return json.loads(text) == value and "/tmp/" not in text and os.sep + "lib" + os.sep not in text


if __name__ == "__main__":
    main()
