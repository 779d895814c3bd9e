"""The contestants of `--steps`: the bare model, and xds and DeepSpeed with and without offload."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from device import Device, pick
from model import GPT, Shape, build, draw
from scale import Scale
from torch import Tensor

CLIP = 1000.0  # norms of these models stay far below
BARE, NONE, WAIT, GUESS, DEEPSPEED = "bare", "no offload", "wait", "super_offload", "DeepSpeed"


class Case(NamedTuple):
    """A contestant: a name of `Scale.models`, the stage, and one of the kinds above."""

    size: str
    stage: int
    kind: str

    @property
    def params_on_host(self) -> bool:
        return self.stage == 3 and self.size == "6.7B"

    @property
    def label(self) -> str:
        place = " + offload_param" if self.params_on_host else ""
        return f"stage {self.stage}{place}, {self.kind}"


def missing(kind: str) -> str:
    """Why a contestant cannot run here; empty if it can."""
    if kind == DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return ""


def config_of(case: Case, micro_batch_size: int) -> dict[str, Any]:
    """The JSON of a contestant."""
    zero: dict[str, Any] = {"stage": case.stage}
    if case.kind != NONE:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if case.kind in (WAIT, GUESS):
        zero["offload_optimizer"] |= {
            "super_offload": case.kind == GUESS,
            "overlap_step": case.stage < 3,
        }
    if case.params_on_host:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": zero,
    }
    if case.kind == DEEPSPEED:
        return config | {"steps_per_print": 10**9}
    return config | {"activation_checkpointing": {}}


def run(case: Case, scale: Scale) -> Iterator[dict[str, Any]]:
    """Times of some steps for each number of tokens. Runs in a process of its own."""
    device = pick(dry=scale.dry)
    torch.manual_seed(0)
    shape = scale.models[case.size]
    if case.kind == BARE:
        yield from _run_bare(shape, scale, device)
        return
    start = time.perf_counter()
    step, engine = _engine(case, shape, scale, device)
    built = time.perf_counter() - start
    for name, num_tokens in scale.tokens.items():
        batch = draw(shape, num_tokens, device.torch_device)
        for _ in range(2):
            step(batch)
        times = [device.seconds(lambda b=batch: step(b)) for _ in range(scale.steps)]
        yield {
            "tokens": name,
            "seconds": times,
            "norm": float(engine.get_global_grad_norm() or 0.0),
            "guesses": _num_guesses(engine) if case.kind == GUESS else 0,
            "built_seconds": built,
            "peak_bytes": device.peak_bytes(),
        }


def _run_bare(shape: Shape, scale: Scale, device: Device) -> Iterator[dict[str, Any]]:
    """Forward and backward in bf16, with recomputation."""
    model = build(shape, device.torch_device, torch.bfloat16, recomputes=True)
    for name, num_tokens in scale.tokens.items():
        batch = draw(shape, num_tokens, device.torch_device)
        forward, whole = [], []
        for _ in range(scale.steps + 1):
            losses: list[Tensor] = []
            ahead = device.seconds(lambda b=batch, kept=losses: kept.append(model(b)))
            back = device.seconds(losses.pop().backward)
            forward.append(ahead)
            whole.append(ahead + back)
            model.zero_grad(set_to_none=True)
        flops = shape.flops(num_tokens)
        found = {"tokens": name, "seconds": whole[1:], "forward": median(forward[1:])}
        yield found | {"flops": flops, "peak_bytes": device.peak_bytes()}


def _engine(
    case: Case, shape: Shape, scale: Scale, device: Device
) -> tuple[Callable[[Tensor], None], Any]:
    """One step of the contestant, and its engine."""
    sequences = max(scale.tokens.values()) // shape.context
    config = config_of(case, sequences)
    is_peer = case.kind == DEEPSPEED
    model = build(shape, device.torch_device, torch.bfloat16, recomputes=is_peer)
    engine = _deepspeed(model, config) if is_peer else _xds(model, config)

    def step(batch: Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step, engine


def _num_guesses(engine: Any) -> int:
    guesses = engine._parts.updater._guesses
    return guesses.num_used if guesses is not None else 0


def _xds(model: GPT, config: dict[str, Any]) -> Any:
    import xds

    return xds.initialize(model, config)


def _deepspeed(model: GPT, config: dict[str, Any]) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in (alone | {"MASTER_PORT": port}).items()})
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


__all__ = [
    "BARE",
    "CLIP",
    "DEEPSPEED",
    "GUESS",
    "NONE",
    "WAIT",
    "Case",
    "config_of",
    "missing",
    "run",
]
