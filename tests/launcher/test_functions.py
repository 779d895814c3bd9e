"""`xds.launch`: functions of a notebook or a script on ranks, and messages in a notebook's cells."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import xds
from xds.launcher.functions import launch as module
from xds.utils.messages import write_stderr

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "train.ipynb"
SCRIPT = """
import dataclasses, enum, functools

FACTOR = 3

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Options:
    rate: float = 0.5

class Base:
    def __init__(self, size):
        self.size = size

class Net(Base):
    __slots__ = ("more",)

    def __init__(self):
        super().__init__(2)

    @property
    def width(self):
        return self.size * FACTOR

    @staticmethod
    def depth():
        return count(4)

def count(number):
    return number and count(number - 1) + 1

def factorial():
    def inner(n):
        return 1 if n < 2 else n * inner(n - 1)
    return inner

def train(scale, *, options=Options()):
    assert [field.name for field in dataclasses.fields(options)] == ["rate"]
    values = [Net().width, Net.depth(), inner(5), Color.RED.value, options.rate * scale]
    return json.dumps([*values, functools.reduce(max, values)])

inner = factorial()
"""


def scope() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "__main__", "json": json}
    exec(compile(SCRIPT, "<cell 1>", "exec"), found)
    return found


def test_another_process_calls_a_function_with_all_that_it_names(tmp_path: Path) -> None:
    names = scope()
    (tmp_path / "call").write_bytes(
        module._pickled("", names["train"], (2,), {"options": names["Options"](2.0)})
    )
    text = (
        "from xds.launcher.functions.launch import read_call\n"
        f"train, args, kwargs = read_call(open({str(tmp_path / 'call')!r}, 'rb').read())\n"
        "print(train(*args, **kwargs), train.__code__.co_filename)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "[6, 4, 120, 1, 4.0, 120] <cell 1>\n")


def test_what_cannot_be_sent_a_call_in_a_rank_and_a_failed_rank_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = open(sys.executable, "rb")
    with pytest.raises(xds.UsageError, match=r"^xds.launch\(.*lambda>\): .*; create such objects"):
        xds.launch(lambda: file.read())
    file.close()
    monkeypatch.setattr(module, "_run", lambda command: 3)
    with pytest.raises(xds.XdsError, match=r"^xds.launch\(train\): .* with exit code 3; the rep"):
        xds.launch(scope()["train"], 2, (1,))
    monkeypatch.setenv("XDS_RUN_FOLDER", "/run")
    with pytest.raises(xds.UsageError, match="this process is a rank that a launcher has started"):
        xds.launch(scope()["train"])


def test_messages_go_to_the_cell_and_not_to_the_terminal_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Cell(io.StringIO):
        def fileno(self) -> int:  # as in ipykernel
            return 2

    cell = Cell()
    monkeypatch.setattr(sys, "stderr", cell)
    write_stderr("xds: told\n")
    assert cell.getvalue() == "xds: told\n" and capfd.readouterr() == ("", "")


def cells() -> list[str]:
    listed = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in listed if cell["cell_type"] == "code"]


def losses(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if " to " in line]


@pytest.mark.slow
def test_the_example_notebook_trains_alike_in_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text("\n".join(cells()))
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    one, two = losses(done.stdout)  # both ranks have the same samples
    assert one == two and "stage 3, 2 ranks" in done.stderr


def test_the_example_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    told = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    out = "".join(each["text"] for each in told if each.get("name") == "stdout")
    one, two = losses(out)
    assert one == two
    err = "".join(each["text"] for each in told if each.get("name") == "stderr")
    assert "stage 3, 1 rank," in err and "stage 3, 2 ranks," in err
