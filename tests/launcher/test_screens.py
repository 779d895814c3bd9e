"""What a user sees of a run, in a terminal of 80 columns and in a file. The texts are in screens/."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from forked_launcher import ForkedLauncher

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs pseudo-terminals"),
    pytest.mark.slow,
]
SCREENS = Path(__file__).parent / "screens"
FAILS = """
import torch, xds

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x / RANKS[engine.global_rank]

RANKS = {0: 1.0}
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"},
          "zero_optimization": {"stage": 3}}
engine = xds.initialize(Model(), config)
torch.distributed.barrier()  # rank 0 has said what runs
engine.backward(engine(torch.ones(4, 8)).sum())
"""
SLEEPS = """
import time, torch, xds
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "steps_per_print": 1}
engine = xds.initialize(torch.nn.Linear(8, 8), config)
engine.backward(engine(torch.ones(4, 8)).sum())
engine.step()
time.sleep(600)
"""
TRAINER = """
import torch, transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}

config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2},
          "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
data = [{"x": torch.ones(8), "labels": torch.ones(8)} for _ in range(8)]
arguments = transformers.TrainingArguments(
    "out", deepspeed=config, max_steps=2, per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
    report_to="none", save_strategy="no",
)
transformers.Trainer(Model(), arguments, train_dataset=data).train()
"""
EXAMPLE = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "examples" / "gpt")!r})
sys.argv[1:] = ("--layers 2 --width 32 --heads 2 --context 16 --steps 4 --validate-every 2 --sample 0 "
                "--checkpoints saved").split()
runpy.run_module("train", run_name="__main__")
"""
CHANGES = (
    (r"\r\n", "\n"),
    (r"xds \d+\.\d+\.\d+[\w.+]*", "xds VERSION"),
    (r"/\S*/runs/[\w-]+", "RUN"),
    (r'File "/\S*/(\w+\.py)", line \d+', r'File "FOLDER/\1", line N'),
    (r"pid \d+", "pid N"),
    (r"failed on \S+:", "failed on HOST:"),
    (r"\d+\.\d+ samples/s", "N samples/s"),
    (r"(loss|norm|lr) -?\d[\d.e-]+", r"\1 N"),
    (r"[\d,]+ tokens/s", "N tokens/s"),
    (r"steps in [\d.]+ s", "steps in N s"),
    (r"(?m)^ +[~^]+$\n", ""),  # of Python 3.11 and later
    (r"(?m)^xds: (compil|waiting for another process).*\n", ""),  # where nothing is in the cache
    (r"(?m)^(Failed to load \S+/torchao/|W\d{4} .*torch/utils/_pytree).*\n", ""),  # of torchao
    (r"[^\n]*\r", ""),  # a progress bar redraws its line
    (r"█+\|", "█|"),  # its length follows the width of the terminal and of the rate
    (r"\d+/\d+ \[.*", "PROGRESS"),
    (r"(runtime|per_second)': '[\d.]+'", r"\1': 'N'"),
)


def screen(folder: Path, script: str, *options: str, columns: int, stops_at: str = "") -> str:
    """The normalised output of `xds *options train.py`; SIGINT follows the text `stops_at`, as from Ctrl-C.

    columns: of the terminal; 0: it is a pipe.
    """
    (folder / "train.py").write_text(script)
    if columns:
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        place = os.ttyname(writer)
    else:
        place = str(folder / "pipe")
        os.mkfifo(place)
        reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(place, os.O_WRONLY)
    unwanted = ("COLUMNS", "LINES", "XDS_LOG_LEVEL", "XDS_AS_DEEPSPEED")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    environ = kept | {"PYTHONSAFEPATH": "", "XDS_BACKEND": "gloo"}
    words = ["--nproc-per-node", "2", *options, "train.py"]
    process = ForkedLauncher(words, folder, environ, output=place)
    text, deadline = "", time.monotonic() + 300
    try:
        while select.select([reader], [], [], 0.1)[0] or process.returncode is None:
            if not select.select([reader], [], [], 0)[0]:
                assert time.monotonic() < deadline, text
                continue
            text += os.read(reader, 65536).decode(errors="replace")
            if stops_at and stops_at in text:
                process.send_signal(signal.SIGINT)
                stops_at = ""
        process.wait(60)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        os.close(writer)
        os.close(reader)
    bars = [part for part in re.split(r"[\r\n]", text) if "%|" in part]
    assert all(len(bar) <= columns for bar in bars), bars
    for pattern, new in CHANGES:
        text = re.sub(pattern, new, text)
    return text


CASES: dict[str, tuple[str, tuple[str, ...], str, int]] = {
    "fails": (FAILS, (), "", 0),
    "interrupted": (SLEEPS, (), "step 1", 80),
    "trainer": (TRAINER, ("--as-deepspeed",), "", 80),
    "example": (EXAMPLE, (), "", 40),
    "example_in_a_pipe": (EXAMPLE, (), "", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_screen_of(case: str, tmp_path: Path) -> None:
    if case == "trainer":
        pytest.importorskip("transformers")
    script, options, stops_at, columns = CASES[case]
    text = screen(tmp_path, script, *options, columns=columns, stops_at=stops_at)
    golden = SCREENS / f"{case}.txt"
    if os.environ.get("XDS_WRITE_SCREENS"):
        golden.write_text(text)
    assert text == golden.read_text()
