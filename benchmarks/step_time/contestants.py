"""The contestants of the step-time benchmark: each takes a model and returns a function that trains one batch.

All use AdamW with the same settings and clip the global gradient norm at 1.0. Other libraries run as
released: with their defaults, and with the fused optimizer where they support it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import Skip  # noqa: E402

Step = Callable[[Tensor], Tensor]

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build(name: str, model: nn.Module, batch: Tensor, bf16: bool) -> Step:
    """The contestant called `name`, ready to step; raises `Skip` with the reason if it cannot."""
    kind, _, option = name.partition("-")
    if kind == "xds":
        stage, _, shared = option.partition("-")
        return _xds(model, batch, int(stage), bf16, shares=shared == "shared")
    if kind == "deepspeed":
        return _deepspeed(model, batch, int(option), bf16)
    if kind == "fsdp2":
        return _fsdp2(model, bf16, blocks=option != "root")
    if kind == "ddp":
        return _ddp(model, bf16, as_view=option == "view")
    if kind == "compute":
        return _compute(model, bf16)
    return _torch_loop(model, model, bf16)


def _compute(model: nn.Module, bf16: bool) -> Step:
    """Forward and backward only, without communication and update: no engine can be faster than this."""
    model = model.bfloat16() if bf16 else model

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        model.zero_grad()
        return loss

    return step


def _torch_loop(model: nn.Module, forward: nn.Module, autocast: bool) -> Step:
    """A plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    parameters = list(model.parameters())

    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = forward(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _ddp(model: nn.Module, bf16: bool, as_view: bool) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    return _torch_loop(model, wrapped, bf16)


def _fsdp2(model: nn.Module, bf16: bool, blocks: bool) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if blocks:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _torch_loop(model, model, False)


def _json(batch: Tensor, stage: int, bf16: bool) -> dict[str, Any]:
    """The part of the config that xds and DeepSpeed share."""
    return {
        "train_micro_batch_size_per_gpu": len(batch),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    }


def _engine_loop(engine: Any) -> Step:
    def step(batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _xds(model: nn.Module, batch: Tensor, stage: int, bf16: bool, *, shares: bool) -> Step:
    try:
        import xds

        initialize = xds.initialize
    except ImportError as error:
        raise Skip(f"xds does not import: {error}") from error
    config = _json(batch, stage, bf16)
    if shares:  # one copy of the parameters
        config["zero_optimization"]["shared_parameters"] = True
    return _engine_loop(initialize(model, config))


def _deepspeed(model: nn.Module, batch: Tensor, stage: int, bf16: bool) -> Step:
    try:
        import deepspeed
    except ImportError as error:
        raise Skip("deepspeed is not installed (requirements.txt)") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = _json(batch, stage, bf16) | {"steps_per_print": 10**9}
    # `torch_adam` with `fused` reaches torch.optim.AdamW(fused=True): its own CPU Adam would
    # have to be compiled, and is slower.
    config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return _engine_loop(engine)
