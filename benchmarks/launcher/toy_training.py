"""The training that restart.py kills: a toy GPT that resumes from its last checkpoint.

    xds benchmarks/launcher/toy_training.py FOLDER STAGE SEED NUM_STEPS SAVE_EVERY STEP_SECONDS

Batches are a function of the step only, divided among the ranks, so every number of ranks that divides 12
trains the same. Rank 0 appends "step world_size" to FOLDER/steps, and at the end writes the loss on held-out
batches to FOLDER/final. SIGUSR2 makes a rank leave with code 17.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import xds

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))
from model import GPT, Shape  # noqa: E402

BATCH = 12
LEAVE_CODE = 17
HELD_OUT = 20
SHAPE = Shape(layers=2, width=32, heads=2, context=16, vocabulary=32)


def batch_of(step: int) -> torch.Tensor:
    """Sequences [BATCH, context + 1] of a noisy rule that a small model learns."""
    generator = torch.Generator().manual_seed(step)
    size = (BATCH, SHAPE.context + 1)
    rows = torch.randint(SHAPE.vocabulary, size, generator=generator)
    is_noise = torch.rand(size, generator=generator) < 0.1
    for at in range(1, SHAPE.context + 1):
        follows = (5 * rows[:, at - 1] + 3) % SHAPE.vocabulary
        rows[:, at] = torch.where(is_noise[:, at], rows[:, at], follows)
    return rows


def leave(signum: int, frame: object) -> None:
    sys.exit(LEAVE_CODE)


def train(
    folder: Path, stage: int, seed: int, num_steps: int, save_every: int, step_seconds: float
) -> None:
    """Train to `num_steps`, from wherever an earlier start came; save_every 0 never saves."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"keep_last": 2},
    }
    engine = xds.initialize(GPT(SHAPE), config)
    engine.load_checkpoint(str(folder / "checkpoints"))
    steps = (folder / "steps").open("a") if rank == 0 else None
    while engine.global_steps < num_steps:
        step, begin = engine.global_steps, time.monotonic()
        mine = batch_of(step)[rank * BATCH // world_size : (rank + 1) * BATCH // world_size]
        engine.backward(engine(mine[:, :-1], mine[:, 1:]))
        engine.step()
        if steps is not None:
            print(step, world_size, file=steps, flush=True)
        if save_every and ((step + 1) % save_every == 0 or step + 1 == num_steps):
            engine.save_checkpoint(str(folder / "checkpoints"))
        time.sleep(max(0.0, step_seconds - (time.monotonic() - begin)))
    engine.eval()
    held_out = torch.cat([batch_of(-1 - number) for number in range(HELD_OUT)])
    with torch.no_grad():
        loss = engine(held_out[:, :-1], held_out[:, 1:]).item()
    if steps is not None:
        (folder / "final").write_text(str(loss))
    engine.destroy()


def main() -> None:
    """Read the command line."""
    signal.signal(signal.SIGUSR2, leave)
    stage, seed, num_steps, save_every = map(int, sys.argv[2:6])
    train(Path(sys.argv[1]), stage, seed, num_steps, save_every, float(sys.argv[6]))


if __name__ == "__main__":
    main()
