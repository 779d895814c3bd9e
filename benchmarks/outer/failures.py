"""The loss of groups of which one fails, over that of a run in which none does.

    python benchmarks/outer/failures.py [--steps 300] [--every 10] [--fragments 1] [--quick] [--only killed ...]

`xds --recover` runs four groups of one rank on the GPT, the text and the trained model of loss.py. Group 3 is

    killed     for good, in step 100 of 300
    replaced   killed there, and new processes take its place (--spares 1)
    stopped    (SIGSTOP) there, until the others have taken 50 steps
    slow       each of its steps takes three times as long
    cut        stopped for good: the others go on, and the launcher ends it with them

The loss is that of windows that were not trained, of group 0 after its last meeting. Percent: more than without
a failure. Seconds: of the whole run. Named: what the record of the run says of failures (`xds report`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
KINDS = ("none", "killed", "replaced", "stopped", "slow", "cut")
GROUPS, FAILING, AWAY_STEPS = 4, 3, 50
LIMIT_SECONDS = 1800


def train(folder: Path, kind: str, options: argparse.Namespace) -> None:
    import torch
    from loss import BATCH, CLIP, DECAY, RATES, Batches, rate_of, trained_before
    from torch.nn import functional as F

    import xds

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    model, batches = trained_before("1M", options.seed, options.before), Batches(options.seed)
    optimizer = {"type": "Nesterov", "params": {"lr": 1.0, "momentum": 0.0}}
    outer = {"groups": GROUPS, "steps": options.every, "optimizer": optimizer}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": RATES["1M"], "weight_decay": DECAY}},
        "gradient_clipping": CLIP,
        "zero_optimization": {"unit_min_numel": 1},
        "outer": outer | {"fragments": options.fragments, "window_seconds": 1.0},
        "recovery": {"enabled": True},
        "report_folder": str(folder / "report"),
        "log_level": "warning",
    }
    engine = xds.initialize(model, config)
    fails_at, is_new = options.steps // 3, engine.global_steps > 0
    while engine.global_steps < options.steps and not (folder / "done").exists():
        step = engine.global_steps
        begin_seconds = time.monotonic()
        tokens, targets = batches.of(step, rank)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_of(step, options.steps, RATES["1M"])
        loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        if rank == FAILING and step == fails_at and not is_new:
            if kind in ("killed", "replaced"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind in ("stopped", "cut"):
                (folder / "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
        engine.backward(loss)
        engine.step()
        if not rank:
            (folder / "steps").write_text(str(engine.global_steps))
        if rank == FAILING and kind == "slow":
            time.sleep(2 * (time.monotonic() - begin_seconds))
    if not rank:
        engine.eval()
        (folder / "loss").write_text(str(batches.loss(engine)))
        (folder / "done").touch()
    engine.destroy()


def run(kind: str, options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Start a run with a failure, and wait for its end."""
    from xds.launcher.reporting.records import read_run

    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder, begin_seconds = Path(place), time.monotonic()
        spares = ["--spares", "1"] if kind == "replaced" else []
        command = [sys.executable, "-m", "xds", "--recover", *spares]
        command += ["--nproc-per-node", str(GROUPS), "--log-dir", str(folder / "logs")]
        command += [str(Path(__file__).resolve()), "--train", kind, "--folder", place, *words]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, env=environ, stderr=subprocess.PIPE, text=True, cwd=place
        )
        stopped: int | None = None
        try:
            while process.poll() is None and time.monotonic() - begin_seconds < LIMIT_SECONDS:
                with suppress(OSError, ValueError):
                    if stopped is None and kind == "stopped":
                        pid, stopped = int((folder / "stopped").read_text()), _steps(folder)
                    if stopped is not None and _steps(folder) >= stopped + AWAY_STEPS:
                        os.kill(pid, signal.SIGCONT)
                if kind == "cut" and (folder / "done").exists():  # the others have ended
                    with suppress(OSError, ValueError):
                        os.kill(int((folder / "stopped").read_text()), signal.SIGKILL)
                time.sleep(0.05)
            hangs = process.poll() is None
        finally:
            if process.poll() is None:
                process.terminate()
            err = process.communicate()[1]
        found: dict[str, Any] = {
            "kind": kind,
            "seconds": round(time.monotonic() - begin_seconds, 1),
        }
        if hangs or not (folder / "loss").exists():
            return found | {
                "loss": None,
                "hangs": hangs,
                "rc": process.returncode,
                "stderr": err[-2000:],
            }
        named = [each.text for each in read_run(str(folder / "report")).failures]
        return found | {"loss": float((folder / "loss").read_text()), "named": named}


def _steps(folder: Path) -> int:
    return int((folder / "steps").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--every", type=int, default=10, help="steps between meetings of a fragment"
    )
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--before", type=int, default=1000, help="steps without groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS[1:], default=list(KINDS[1:]))
    parser.add_argument("--quick", action="store_true", help="150 steps from a model of 20 steps")
    parser.add_argument("--train", choices=KINDS, help="on a rank")
    parser.add_argument("--folder", type=Path, help="on a rank")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.before = 150, 20
    if options.train:
        train(options.folder, options.train, options)
        return 0
    from loss import trained_before

    trained_before("1M", options.seed, options.before)  # the ranks read it
    words = [
        f"--{key}={getattr(options, key)}"
        for key in ("steps", "every", "fragments", "before", "seed")
    ]
    first, is_bad = None, False
    for kind in ("none", *options.only):
        found = run(kind, options, words)
        first = found["loss"] if first is None else first
        if found["loss"] is not None and first:
            found["percent"] = round(100 * (found["loss"] / first - 1), 2)
        is_named = kind == "none" or any(
            f"group {FAILING}" in text for text in found.get("named", ())
        )
        is_bad |= not is_named or found.get("percent", 100) > 1
        print(json.dumps(found), flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
