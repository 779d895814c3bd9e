"""Test helper: loads inconsistent checkpoints, and checks that nothing crashes and nothing changes.

changed checkpoint  ->  verify  ->  load        a refusal is one xds error, and the engine is unchanged
                                                what verify accepts loads, or does not match this engine
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from manifest_damages import Damages
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import xds
from xds.launcher import checkpoint as command
from xds.utils.errors import DamagedError, UsageError, XdsError
from xds.zero.checkpoint.snapshot import Snapshot

WIDTH = 6
ABOUT_THIS_ENGINE = (  # what a sound checkpoint may be refused for
    *(
        "does not fit this model",
        "this engine has",
        "cannot be loaded in this layout",
        "is refused here",
    ),
    *("in the middle of an accumulation", "and this xds reads"),
)
BASES: dict[str, dict[str, Any]] = {
    "fp32, stage 0": {"zero_optimization": {"stage": 0}},
    "fp16, stage 2, half a step": {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "gradient_accumulation_steps": 2,
    },
    "bf16, stage 3": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}


SLICED: dict[str, Any] = {  # on two ranks
    "fp32, stage 1, in slices": {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {
            "tp_size": 2,
            "plan": {"frozen": "colwise_gather_output", "last": "rowwise_split_input"},
        },
        "gradient_accumulation_steps": 2,
    }
}


class Net(nn.Module):
    """Tied, frozen, empty and lone parameters, buffers of all sorts, one of them each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("rank", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x.to(self.inner.weight.dtype)))
        x = self.gain * self.outer(self.frozen(x))
        return self.last(x).float().square().mean()


def engine_of(base: str) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
        **(BASES | SLICED)[base],
    }
    config["zero_optimization"] = {"unit_min_numel": 0, **config["zero_optimization"]}
    data = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)))
    engine = xds.initialize(Net(), config, training_data=data)
    batches = iter(engine.training_dataloader)
    for _ in range(3):  # with two micro-batches a step: in the middle of one
        engine.backward(engine(next(batches)[0]))
        engine.step()
    engine.module.rank.fill_(10 + dist.get_rank())
    return engine


def digest(engine: Any) -> str:
    """Of everything a load may change."""
    parts = engine._parts
    snapshot = Snapshot(parts.module, parts.sharded, parts.updater, parts.optimizer)
    found: list[Any] = [parts.loss_scale.state_dict(), parts.loss_scale.value]
    for block in (*snapshot.values, *snapshot.states, *snapshot.grad_totals()):
        found += [block.flat, block.key, block.start, block.tensor.detach().cpu().tolist()]
    for flat, (local, filled) in snapshot.grad_locals().items():
        found += [flat, filled, local.tolist()]
    found += [list(snapshot.constants)]
    found += [
        {k: v for k, v in group.items() if k != "params"} for group in parts.optimizer.param_groups
    ]
    found += [parts.scheduler.state_dict(), parts.loader.position()]
    found += [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
    found += [torch.get_rng_state().tolist(), random.getstate()]
    return sha256(repr(found).encode()).hexdigest()


def try_often(folder: str, trials: int, seed: int) -> dict[str, Any]:
    """On every rank: `trials` changes, of each base in turn. What came of them how often, what went wrong."""
    logging.getLogger("xds").setLevel(logging.CRITICAL)
    is_pair = dist.is_initialized() and dist.get_world_size() == 2
    bases = BASES | SLICED if is_pair else BASES
    all_of_them = [
        Trials(Path(folder) / str(number), base, seed) for number, base in enumerate(bases)
    ]
    for number in range(trials):
        all_of_them[number % len(all_of_them)].trial()
    outcomes = sum((one.outcomes for one in all_of_them), Counter[str]())
    problems = [problem for one in all_of_them for problem in one.problems]
    return {"outcomes": dict(outcomes), "problems": problems}


class Trials:
    """An engine, and a checkpoint of it that is changed and mended again and again."""

    def __init__(self, folder: Path, base: str, seed: int) -> None:
        self._base = base
        self._folder = folder
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._engine = engine_of(base)
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        note = {"note": (1, 2.5, None), "inf": float("inf"), 5: [torch.arange(3)]}
        for where in (folder, folder / "good"):
            self._engine.save_checkpoint(where, "tag", client_state=note)
        self._barrier()
        self._keys = [set(group) for group in self._engine._parts.optimizer.param_groups]
        self._damages = Damages(folder / "tag", seed)
        self._reset()
        self._before = digest(self._engine)

    def _barrier(self) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def _write(self, files: dict[Path, bytes]) -> None:
        self._barrier()
        if self._is_first:
            for path, content in files.items():
                path.write_bytes(content)
        self._barrier()

    def _reset(self) -> None:
        """To the state that was saved, and one step of some things further: a load would show."""
        engine = self._engine
        for group, keys in zip(engine._parts.optimizer.param_groups, self._keys, strict=True):
            for added in set(group) - keys:  # an unknown hyperparameter is kept
                del group[added]
        engine.load_checkpoint(self._folder / "good")
        engine.global_steps += 5
        engine.micro_steps += 5 * engine.gradient_accumulation_steps()
        with torch.no_grad():
            engine.module.norm.running_mean.fill_(7.0)
        torch.manual_seed(0)
        random.seed(0)

    def trial(self) -> None:
        """One change."""
        files = self._damages.next()
        self._write(files)
        is_sound = self._verify()
        try:
            self._engine.load_checkpoint(self._folder, "tag")
            said, outcome = "", "loaded"
            if "bytes of" not in self._damages.what:  # the gaps of a buffer would have some
                self._train()
        except UsageError as error:
            said = str(error)
            outcome = "refused" if isinstance(error, DamagedError) else "does not fit"
        except Exception as error:
            said, outcome = f"{type(error).__name__}: {error}", "broke"
        self._judge(is_sound, outcome, said)
        self._barrier()
        self._write({path: self._damages.mended()[path] for path in files})

    def _train(self) -> None:
        """What was loaded trains, or says that its values are not finite."""
        with contextlib.suppress(XdsError):
            for _ in range(2):
                self._engine.backward(self._engine(torch.ones(2, WIDTH)))
                self._engine.step()

    def _judge(self, is_sound: bool, outcome: str, said: str) -> None:
        self.outcomes[f"{'whole' if is_sound else 'damaged'}: {outcome}"] += 1
        wrong = []
        if outcome == "broke" or (outcome == "does not fit" and not _is_about_engine(said)):
            wrong.append(outcome)
        if is_sound and outcome == "refused":
            wrong.append("verify passes it")
        if outcome == "loaded":
            self._reset()
        elif digest(self._engine) != self._before:
            wrong.append("something has changed")
            self._reset()
        if "half-way" in said:
            wrong.append("half-way")
        if any(ord(letter) < 32 for letter in said) or len(said) > 2000:
            wrong.append("not one plain sentence")
        if wrong:
            self.problems.append(f"{self._base}:{self._damages.what}: {wrong}: {said[:500]}")

    def _verify(self) -> bool:
        """Whether `xds checkpoint verify` passes it; other commands must not break, either."""
        codes = []
        for name in ("verify", "info"):
            out = io.StringIO()
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    codes.append(command.main([name, str(self._folder), "--tag", "tag"]))
            except Exception as error:
                self.problems.append(
                    f"{self._base}:{self._damages.what}: {name}: {type(error).__name__}: {error}"
                )
                codes.append(1)
        return codes[0] == 0


def _is_about_engine(said: str) -> bool:
    return any(words in said for words in ABOUT_THIS_ENGINE)
