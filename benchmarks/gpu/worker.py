"""A process with one contestant. It reads commands as JSON lines and answers with JSON lines.

Contestants live in processes of their own, so their memory is measured apart, an error ends only one of them,
and DeepSpeed can have its own search path.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:  # python -P and PYTHONSAFEPATH leave a script's folder out
    sys.path.insert(0, str(HERE))


class Worker:
    """The commands; each returns what is sent back."""

    def __init__(self) -> None:
        self.contestant: Any = None

    def build(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Build a contestant and take three steps; the losses and the seconds that it took."""
        from contestants import Contestant
        from device import pick

        self.device = pick(dry=spec["dry"])
        start = time.perf_counter()
        self.contestant = Contestant(spec, self.device)
        losses = [float(self.contestant.step()) for _ in range(3)]
        self.device.reset_peaks()
        return {"losses": losses, "seconds": time.perf_counter() - start}

    def turn(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Seconds a step of `steps` steps, host and device; and the seconds of the host alone."""
        self.device.synchronize()
        start = time.perf_counter()
        for _ in range(spec["steps"]):
            loss = self.contestant.step()
        host = time.perf_counter() - start
        self.device.synchronize()
        whole = time.perf_counter() - start
        return {"seconds": whole / spec["steps"], "host": host / spec["steps"], "loss": float(loss)}

    def memory(self, _: dict[str, Any]) -> dict[str, Any]:
        """Peaks of two steps, and what the plan says."""
        self.device.reset_peaks()
        for _ in range(2):
            self.contestant.step()
        self.device.synchronize()
        engine = self.contestant.engine
        plan = engine.memory_plan() if hasattr(engine, "memory_plan") else {}
        return {
            "allocated": self.device.peak_allocated(),
            "reserved": self.device.peak_reserved(),
            "between_steps": self.device.allocated(),
            "plan": sum(size for kind, size in plan.items() if kind not in ("host", "disk")),
        }

    def activations(self, _: dict[str, Any]) -> dict[str, Any]:
        """Bytes that forward and backward of the plain loop add to its states and gradients."""
        self.device.synchronize()
        before = self.device.allocated()
        self.device.reset_peaks()
        self.contestant.forward_backward()
        self.device.synchronize()
        return {"activations": self.device.peak_allocated() - before}

    def rate(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The measured rate of a bf16 matrix product, and facts about the device."""
        from device import matmul_flops, pick

        device = pick(dry=spec["dry"])
        flops = matmul_flops(device, spec["width"])
        device.empty_cache()
        return {"flops": flops, "total": device.total_bytes(), "about": device.about()}

    def kernels(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Build and load the kernels of xds for the device, with an error where that fails."""
        from device import pick

        from xds.ops import libraries

        start = time.perf_counter()
        name = libraries.optimizer_library(pick(dry=spec["dry"]).torch_device)
        libraries.load(name, require=True)
        return {"name": name, "seconds": time.perf_counter() - start}

    def trace(self, spec: dict[str, Any]) -> dict[str, Any]:
        """A profile of one step, as numbers; see profile_step.py."""
        from profile_step import profile

        return profile(self.contestant, self.device, Path(spec["file"]))

    def save(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a save (the call, and until it is complete) and of a load, and the bytes."""
        folder, engine = Path(spec["folder"]), self.contestant.engine
        shutil.rmtree(folder, ignore_errors=True)
        self.device.synchronize()
        start = time.perf_counter()
        engine.save_checkpoint(str(folder))
        call = time.perf_counter() - start
        engine.wait_for_checkpoint()
        whole = time.perf_counter() - start
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        start = time.perf_counter()
        path, _ = engine.load_checkpoint(str(folder))
        self.device.synchronize()
        loaded = time.perf_counter() - start
        shutil.rmtree(folder, ignore_errors=True)
        if path is None:
            raise RuntimeError(f"no checkpoint was found in {folder}")
        return {"call": call, "whole": whole, "load": loaded, "bytes": size}

    def torch_save(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Seconds of torch.save with fsync of masters and moments of the plain loop, and of a load."""
        import torch

        file, chosen = Path(spec["folder"] + ".pt"), self.contestant
        state = {"masters": chosen.masters, "optimizer": chosen.optimizer.state_dict()}
        self.device.synchronize()
        start = time.perf_counter()
        with file.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        whole = time.perf_counter() - start
        size = file.stat().st_size
        start = time.perf_counter()
        torch.load(file, map_location=self.device.torch_device, weights_only=False)
        self.device.synchronize()
        loaded = time.perf_counter() - start
        file.unlink()
        return {"call": whole, "whole": whole, "load": loaded, "bytes": size}


def main() -> None:
    """Serve commands until the input ends."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)  # a process that hangs says where
    import torch

    try:
        import xds  # noqa: F401  (before it is needed: that takes seconds)
    except Exception:
        traceback.print_exc()  # its use fails again, with a message
    if os.environ.get("XDS_BENCH_DRY"):
        torch.set_num_threads(1)
    # libraries and what they start print, and may read: they get neither pipe
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = Worker()
    for line in commands:
        spec = json.loads(line)
        try:
            answer = getattr(worker, spec["do"])(spec)
        except BaseException as error:
            text = (str(error).strip() or "no message").splitlines()[0][:200]
            answer = {"error": f"{type(error).__name__}: {text}"}
            traceback.print_exc()
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # exit hooks of libraries may abort a finished process


if __name__ == "__main__":
    main()
