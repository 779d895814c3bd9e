"""Time the start-up costs of xds: the import, the help text and the config check.

    python benchmarks/startup.py [--quick]

Each runs in a new process; the variants alternate. `import xds` is timed with everything that `initialize`
needs, over `import torch` alone in the neighbouring turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from harness import Row, Watch, finish  # noqa: E402

LIMIT_SECONDS = 0.3
CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def seconds(command: list[str]) -> float:
    """Wall time of one new process, which must succeed."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return taken


def find_command() -> list[str]:
    """The `xds` command in the folder of this interpreter."""
    beside = Path(sys.executable).parent / "xds"
    found = str(beside) if beside.exists() else shutil.which("xds")
    if found is None:
        raise SystemExit("no `xds` command: install the package first (pip install -e .)")
    return [found]


def main() -> int:
    """Run the commands in turn; 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three turns; keeps nothing")
    options = parser.parse_args()
    turns = 3 if options.quick else 9
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        python, xds = [sys.executable, "-c"], find_command()
        commands = {
            "python": [*python, "pass"],
            "import torch": [*python, "import torch"],
            "import xds": [*python, "import torch; from xds import Config, Engine, initialize"],
            "xds --help": [*xds, "--help"],
            "xds check": [*xds, "check", str(config), "--world-size", "8"],
        }
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            seconds(command)  # warms up the file cache for all rows
        with Watch() as watch:
            for _ in range(turns):
                for name, command in commands.items():
                    samples[name].append(seconds(command))
    over = [a - b for a, b in zip(samples["import xds"], samples["import torch"], strict=True)]
    torch_seconds = statistics.median(samples["import torch"])
    figures = {
        "import xds, over import torch": (over, f"import torch {torch_seconds:.2f} s"),
        "xds --help": (samples["xds --help"], ""),
        "xds check": (samples["xds check"], ""),
    }
    bare = f"an empty python {statistics.median(samples['python']):.3f} s"
    rows = [
        Row(
            name,
            statistics.median(values),
            min(values),
            max(values),
            must=LIMIT_SECONDS,
            unit=" s",
            note=note or bare,
            samples={name: values},
            others_busy=watch.others,
        )
        for name, (values, note) in figures.items()
    ]
    return finish(__file__, rows, keeps=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())
