"""A script for `xds --recover` with groups that meet. The environment says which rank ends, and where."""

import json
import os
import signal
import time
import zlib
from pathlib import Path

import torch
from torch import nn

import xds
from xds.engine.living_groups import LivingGroups

RANK, OUT = int(os.environ.get("RANK", "0")), Path(os.environ.get("OUT", ""))
OUTER = json.loads(os.environ.get("OUTER", '{"groups": 1}'))
GROUP = RANK * OUTER["groups"] // int(os.environ.get("WORLD_SIZE", "1"))
STEPS, STAGE = int(os.environ.get("STEPS", "12")), int(os.environ.get("STAGE", "1"))
# by rank: [step, "forward", signal], or [number of a meeting, "meeting", signal]
DEATHS = json.loads(os.environ.get("DEATHS", "{}"))
SIZES = json.loads(os.environ.get("SIZES", "{}"))  # by group: of a micro-batch, 4 by default
PAUSES = json.loads(os.environ.get("PAUSES", "{}"))  # by group: seconds of each step
WAITS = "WAITS" in os.environ  # until all groups are there


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


NAMES = [name for name, _ in build().named_parameters()]


def micro_batch(step: int, data_rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


def die(step: int, where: str) -> None:
    when, place, how = DEATHS.get(str(RANK), [None, "", ""])
    if (when, place) == (step, where) and "XDS_JOINS" not in os.environ:
        if how == "SIGSTOP":
            (OUT / f"stopped{RANK}").write_text(str(os.getpid()))
        os.kill(os.getpid(), getattr(signal, how))


def main() -> None:
    size = SIZES.get(str(GROUP), 4)
    config = {
        "train_micro_batch_size_per_gpu": size,
        "optimizer": json.loads(os.environ["OPTIMIZER"]),
        "zero_optimization": {"stage": STAGE, "unit_min_numel": 1},
        "outer": OUTER,
        "recovery": {"enabled": True},
        "report_folder": str(OUT / "report"),
    }
    engine = xds.initialize(build().eval(), config)
    mean, history, loop = LivingGroups._mean, [], engine._parts.outer

    def dies_in_mean(self, trial, now, meet):
        found = mean(self, trial, now, meet)
        die(trial.number, "meeting")
        return found

    LivingGroups._mean = dies_in_mean
    if "SAVE" in os.environ:
        engine.resume(OUT / "saved")
    started = engine.global_steps
    last, is_whole = max(STEPS, started + 4), not WAITS
    while engine.global_steps < last or not is_whole:
        x, y = micro_batch(engine.global_steps, engine.dp_rank, size)
        loss = nn.functional.cross_entropy(engine(x), y)
        die(engine.global_steps, "forward")
        engine.backward(loss)
        engine.step()
        # a meeting in the background may have written it already
        outer = torch.cat([fragment.outer for fragment in loop._fragments])
        digest = zlib.crc32(outer.numpy().tobytes()) if loop._now is None else None
        history.append([engine.global_steps, loop._version, loss.item(), digest])
        is_whole |= len(loop._members) == OUTER["groups"] and loop._version > 3
        (OUT / f"version{RANK}").write_text(str(loop._version))
        time.sleep(PAUSES.get(str(GROUP), 0.0))
    if "SAVE" in os.environ:
        engine.save_checkpoint(OUT / "saved")
    state = engine.full_state_dict(rank0_only=False)
    found = {
        "history": history,
        "started": started,
        "values": torch.cat([state[name].flatten() for name in NAMES]).tolist(),
        "members": loop._members,
        "sent": engine.bytes_sent().get("outer", 0),
    }
    engine.destroy()
    (OUT / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
