"""Makes the checkpoints of this folder with DeepSpeed itself, and records how it went on from them.

    python make.py [--out DIR] [--only NAME]       with DeepSpeed 0.19.8, on CPU processes

A run trains three steps, saves, and trains three more, whose losses and gradient norms go to runs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).resolve().parent
WORLD_SIZE = 2
WORLD_SIZES = {"moe": 4}  # two that share experts, twice
RUNS = [
    *(("plain", stage, "fp32") for stage in (0, 1, 2, 3)),
    *(("plain", stage, "bf16") for stage in (1, 2, 3)),
    *(("plain", stage, "fp16") for stage in (1, 3)),
    *(("rich", stage, "fp32") for stage in (1, 2, 3)),
    ("rich", 3, "bf16"),
    ("moe", 2, "bf16"),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    path = asked.out / "runs.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    for name, stage, precision in RUNS:
        key = f"{name}_zero{stage}_{precision}"
        if asked.only not in key:
            continue
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            world_size = WORLD_SIZES.get(name, WORLD_SIZE)
            mp.spawn(_train, (world_size, name, stage, precision, folder), world_size)
            runs[key] = json.loads(answer.read_text())
            answer.unlink()
            for script in Path(folder).glob("*.py"):  # converters that DeepSpeed copies in
                script.unlink()
            shutil.rmtree(asked.out / key, ignore_errors=True)
            shutil.copytree(folder, asked.out / key, ignore=shutil.ignore_patterns("rendezvous"))
        path.write_text(json.dumps(runs, indent=1) + "\n")
        print(key, runs[key]["losses"])


def _train(rank: int, world_size: int, name: str, stage: int, precision: str, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    sys.path.insert(0, str(HERE))
    import deepspeed  # after the environment is set
    from recipes import (
        CLIENT_STATE,
        STEPS_AFTER,
        STEPS_BEFORE,
        batch_of,
        build,
        config_of,
        groups_of,
    )

    config = config_of(name, stage, precision, world_size)
    config["optimizer"]["params"]["torch_adam"] = True
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = build(name)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(name, model), config=config
    )

    def step(number: int) -> tuple[float, float | None]:
        loss = engine(batch_of(number, rank, world_size))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        norm = engine.get_global_grad_norm()  # None where DeepSpeed does not keep it
        return mean.item() / world_size, None if norm is None else float(norm)

    for number in range(STEPS_BEFORE):
        step(number)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    after = [step(STEPS_BEFORE + number) for number in range(STEPS_AFTER)]
    answer: dict[str, Any] = {
        "deepspeed": deepspeed.__version__,
        "losses": [loss for loss, _ in after],
        "norms": [norm for _, norm in after],
    }
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads and exit hooks may abort a finished process


if __name__ == "__main__":
    main()
