"""A run that is killed: a small GPT on several ranks, with saves. Started by kills.py and step_time.py.

Environment: STEPS, OUT (a folder: `unit3.jsonl` gets a line for each step, kill and end), RECOVERY (0: without
the section), STAGE, MICS, PIPE, HOSTS (so many are pretended on this machine), TURNS (so many steps in turn
keep no copy of the states, one, and a second one), and PLAN (JSON: [{"number", "unit", "step", "phase",
"signal", "world", "after", "is_second"}]). A kill comes at or after its step, once so many ranks are there. It
comes when the others have recovered from the kill `after`; the second of two before.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import xds

UNIT = -1  # until this process has its place: a spare would wait here for it
STEPS = int(os.environ.get("STEPS", "60"))
OUT = Path(os.environ["OUT"])
PLAN = json.loads(os.environ.get("PLAN", "[]"))
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "10"))
IS_WARM = "XDS_SPARE" in os.environ
STAGE, MICS = int(os.environ.get("STAGE", "0")), int(os.environ.get("MICS", "1"))
PIPE, NUM_HOSTS = int(os.environ.get("PIPE", "1")), int(os.environ.get("HOSTS", "1"))
WIDTH, TOKENS, VOCABULARY = int(os.environ.get("WIDTH", "64")), 32, 256


def write(**record: Any) -> None:
    # one write: a kill leaves no half of a line
    line = json.dumps({"seconds": time.time(), **record}) + "\n"
    descriptor = os.open(OUT / f"unit{UNIT}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Samples(torch.utils.data.Dataset):
    """Tokens, and which samples were read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (2000, TOKENS + 1), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> torch.Tensor:
        self.read.append(number)
        return self.tokens[number]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


engine: Any = None
is_recovering = False


def allows(entry: dict[str, Any], generation: int) -> bool:
    """What has to be before this kill has been."""
    if engine.world_size < entry.get("world", 0):
        return False
    if entry.get("after") is None:
        return True
    done = OUT / f"done{entry['after']}"
    if not done.exists():
        return False
    before = int(done.read_text() or -2)
    if entry["is_second"]:
        return generation <= before + 1
    return generation > before and not is_recovering


def reach(phase: str) -> None:
    """End this process here if the plan says so."""
    for entry in PLAN:
        # healing is no part of a step: it comes at the first failure after the entry's step
        is_here = entry["unit"] == UNIT and entry["phase"] == phase
        if is_here and engine is not None and engine.global_steps >= entry["step"]:
            done = OUT / f"done{entry['number']}"
            if done.exists():  # in the process before this one
                continue
            generation = engine._parts.recovery.generation
            if not allows(entry, generation):
                continue
            done.write_text(str(generation))
            step, how = engine.global_steps, entry["signal"]
            write(kill=phase, step=step, how=how, generation=generation)
            if entry["signal"] == "exception":
                PLAN.remove(entry)
                raise RuntimeError(f"planned, in {phase}")
            os.kill(os.getpid(), getattr(signal, entry["signal"]))


def patch(owner: type, name: str, before: str = "", after: str = "") -> None:
    inner = getattr(owner, name)

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        reach(before)
        result = inner(self, *args, **kwargs)
        reach(after)
        return result

    setattr(owner, name, outer)


def patch_all(model: nn.Module) -> None:
    if "TURNS" in os.environ:
        take_turns(int(os.environ["TURNS"]))
    if not PLAN:
        return
    from xds.engine.checkpoint.saver import SaveJob
    from xds.ops.comm.collectives import Collectives
    from xds.zero.model.update import Updater

    if PIPE == 1:
        model.head.register_forward_pre_hook(lambda *_: reach("forward"))
    else:
        from xds.pipe.channel import Channel

        patch(Channel, "take_forward", "forward")
        patch(Channel, "send_backward", "", "backward")
    model.blocks[1].register_full_backward_hook(lambda *_: reach("backward"))
    patch(Collectives, "reduce_scatter", "before sum", "in sum")
    patch(Collectives, "sum_whole", "before sum", "in sum")
    patch(Collectives, "gather_small", "before norm", "after norm")
    patch(Collectives, "start_gather_small", "before norm", "after norm")
    patch(Updater, "step", "before update", "after update")
    patch(SaveJob, "write", "before write", "after write")
    patch(SaveJob, "commit", "before commit", "after commit")
    if os.environ.get("RECOVERY", "1") == "1":
        from xds.engine.checkpoint.image import Image
        from xds.engine.recovering import LiveRecovery

        recover = LiveRecovery._recover

        def note(self: Any, **options: Any) -> Any:
            global is_recovering  # noqa: PLW0603 (the plan asks for it)
            is_recovering = True
            try:
                return recover(self, **options)
            finally:
                is_recovering = False

        LiveRecovery._recover = note  # type: ignore[method-assign]
        patch(LiveRecovery, "_enter", "before group", "after group")
        for name in ("_heal", "_go_back"):  # of several copies, of one
            patch(LiveRecovery, name, "before healing", "after healing")
        if STAGE and MICS == 1:
            patch(Image, "write", "before copy", "after copy")


def take_turns(steps: int) -> None:
    """Let steps in turn keep no copy of the states, one here, and a second one on the next host."""
    from xds.engine.checkpoint.versions import Versions
    from xds.engine.recovering import LiveRecovery

    keep, send, is_sent = LiveRecovery._keep_version, Versions._send, Versions.is_sent

    def copies(step: int) -> int:
        return step // steps % 3 if step >= steps else 2  # at first all is allocated

    def keep_in_turn(self: Any) -> None:
        if self._target is None or copies(self._target.counters.global_steps):
            keep(self)

    def send_in_turn(self: Any, step: int) -> None:
        if copies(step) == 2:
            send(self, step)

    LiveRecovery._keep_version = keep_in_turn  # type: ignore[method-assign]
    Versions._send = send_in_turn  # type: ignore[method-assign]
    Versions.is_sent = lambda self, step: copies(step) < 2 or is_sent(self, step)  # type: ignore[method-assign]


def train(engine: Any) -> Iterator[None]:
    """Train, and yield after each step. With sharded parameters, or stages, train_batch runs the steps."""
    while STAGE == 3 or PIPE > 1:
        engine.train_batch()
        yield
    for tokens in engine.training_dataloader:
        engine.backward(engine(tokens))
        before = engine.global_steps
        engine.step()
        if engine.global_steps > before:
            yield


def pretend_host() -> None:
    """Be on one of several hosts with as many ranks each."""
    if NUM_HOSTS > 1:
        from xds.recovery.spares import take_place

        take_place()  # the host is that of the rank
        host = int(os.environ["RANK"]) * NUM_HOSTS // int(os.environ["WORLD_SIZE"])
        os.environ["GROUP_RANK"] = str(host)


def main() -> None:
    global engine, UNIT  # noqa: PLW0603 (the plan asks for its step)
    pretend_host()
    torch.manual_seed(0)
    model = Gpt()
    patch_all(model)
    data, rows = Samples(), int(os.environ.get("ROWS", "2"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": int(os.environ.get("ACCUMULATION", "1")),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "checkpoint": {"keep_last": 2},
        "communication": {"shared_memory": os.environ.get("SHARED_MEMORY", "1") == "1"},
    }
    if os.environ.get("RECOVERY", "1") == "1":
        config["recovery"] = {"enabled": True}
    if STAGE:
        groups = {"mics_shard_size": MICS} if MICS > 1 else {}
        config["zero_optimization"] = {"stage": STAGE, **groups}
    if "REPORT" in os.environ:
        config["report_folder"] = os.environ["REPORT"]
    if PIPE > 1:
        config["pipeline"] = {"stages": PIPE}
    engine = xds.initialize(model, config, training_data=data)
    UNIT = int(os.environ["RANK"])
    write(start=os.getpid(), warm=IS_WARM, launcher=os.getppid())
    recovery, micro_steps = engine._parts.recovery, engine.micro_steps
    while engine.global_steps < STEPS:
        for _ in train(engine):
            norm, world = engine.get_global_grad_norm(), engine.world_size
            # of the step that counts: those of one that was dropped, or is taken again, come before
            numbers = data.read[-rows * max(1, engine.micro_steps - micro_steps) :]
            data.read.clear()
            micro_steps = engine.micro_steps
            write(
                step=engine.global_steps,
                norm=norm,
                world=world,
                cpu=time.process_time(),
                generation=recovery.generation,
                samples=numbers,
            )
            if engine.global_steps % SAVE_EVERY == 0:
                engine.save_checkpoint(OUT / "checkpoints")
            if engine.global_steps >= STEPS:
                break
    whole = engine.full_state_dict(rank0_only=False)
    values = torch.cat([value.flatten() for value in whole.values()]).double()
    checks = [values.norm().item(), values.sum().item(), values[::1000].abs().sum().item()]
    write(end=engine.global_steps, samples=engine.global_samples, checks=checks)


main()
