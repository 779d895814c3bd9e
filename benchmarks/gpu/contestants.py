"""What is timed: a plain loop, the same compiled, xds at each stage, and DeepSpeed.

All train the same weights on the same batch in bf16 with fp32 masters, AdamW and a clipped norm.

The plain loop holds a bf16 model and fp32 masters, as xds does. A step: forward, backward; copy the bf16
gradients into fp32 ones; `clip_grad_norm_` and fused `AdamW` on the masters; copy them into the bf16 model.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
from device import Cpu
from scale import recomputes, shape_of
from torch import Tensor, nn

from offload.model import build, draw  # isort: skip

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


class Contestant:
    """A model with its batch; `step()` trains it once and returns the loss."""

    engine: Any = None
    plan: dict[str, int]

    def __init__(self, spec: dict[str, Any], device: Cpu) -> None:
        self.shape = shape_of(spec["size"], small=spec["small"])
        self.device = device
        torch.manual_seed(2)  # each contestant is a process: all train on the same batch
        self.batch = draw(self.shape, spec["sequences"] * self.shape.context, device.torch_device)
        self.plan = {}
        kind, _, stage = spec["kind"].partition("-")
        self.compiles, recompute = spec.get("compile", False), recomputes(spec["size"])
        model = build(
            self.shape,
            device.torch_device,
            torch.bfloat16,
            recomputes=recompute and kind != "xds",
        )
        if kind == "plain":
            self.step = self._plain(model)
        elif kind == "xds":
            self.step = self._xds(model, int(stage), recompute, spec.get("more", {}))
        else:
            self.step = self._deepspeed(model, int(stage), spec["folder"], spec["own_adam"])

    def _plain(self, model: nn.Module) -> Callable[[], Tensor]:
        params = list(model.parameters())
        masters = [nn.Parameter(param.detach().float()) for param in params]
        for param, master in zip(params, masters, strict=True):
            param.grad, master.grad = torch.zeros_like(param), torch.zeros_like(master)
        options = ADAMW | {"betas": tuple(ADAMW["betas"])}
        optimizer = torch.optim.AdamW(masters, fused=True, **options)
        self.masters, self.optimizer = masters, optimizer
        backend = "inductor" if self.device.is_real else "eager"
        forward = torch.compile(model, backend=backend) if self.compiles else model
        narrow, wide = [p.grad for p in params], [m.grad for m in masters]

        def step() -> Tensor:
            loss: Tensor = forward(self.batch)
            loss.backward()
            with torch.no_grad():
                torch._foreach_copy_(wide, narrow)
                nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
                optimizer.step()
                torch._foreach_copy_(params, masters)
                torch._foreach_zero_(narrow)
            return loss.detach()

        self.forward_backward = lambda: forward(self.batch).backward()
        return step

    def _config(self, stage: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": len(self.batch),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }

    def _xds(
        self, model: nn.Module, stage: int, recompute: bool, more: dict[str, Any]
    ) -> Callable[[], Tensor]:
        import xds

        config = self._config(stage) | more
        if recompute:
            config["activation_checkpointing"] = {}
        if self.compiles:
            config["compile"] = {"enabled": True}
            if not self.device.is_real:
                config["compile"]["backend"] = "eager"
        self.engine = xds.initialize(model, config)
        _name_update(self.engine._parts.updater)
        return self._loop()

    def _loop(self) -> Callable[[], Tensor]:
        engine = self.engine

        def step() -> Tensor:
            loss: Tensor = engine(self.batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    def _deepspeed(
        self, model: nn.Module, stage: int, folder: str, own_adam: bool
    ) -> Callable[[], Tensor]:
        """own_adam: its fused kernel, which is compiled now; else torch's fused AdamW."""
        sys.path.insert(0, folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({k: str(v) for k, v in (alone | {"MASTER_PORT": port}).items()})
        import deepspeed

        config = self._config(stage) | {"steps_per_print": 10**9}
        if not own_adam:
            config["optimizer"]["params"] = ADAMW | {"torch_adam": True, "fused": True}
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return self._loop()


def _name_update(updater: Any) -> None:
    """Let the optimizer's part of a step, without the norm, be a range of a trace."""
    step = updater.step

    def named(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function("bench_update"):
            return step(*args, **kwargs)

    updater.step = named
