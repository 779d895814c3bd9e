"""The side of xds: one rank of an engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import xds

from .case import Case
from .feature import Call
from .groups import param_groups
from .model import Net, build
from .optimizers import OPTIMIZERS
from .script import Step, script
from .side import LOSS_SCALE, Side


class Sharded(Side):
    """One rank's engine."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.stage = case.stage
        self._open()

    def _open(self) -> None:
        config = config_of(self.case, self.stage)
        with xds.zero.Init(config) if self.case.has("BuiltInSlices") else nullcontext():
            self.net = build(self.case)
        groups = param_groups(self.case, self.net)
        self.engine = xds.initialize(self.net, config, **_optimizer(self.case, self.net, groups))
        for feature in self.case.features:
            feature.initialized(self)

    def batch(self, call: Call, samples: int | None = None) -> Tensor:
        return super().batch(call, samples).to(self.engine.device)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        bare: bool = False,
        weight: float | None = None,
    ) -> None:
        if bare:
            loss.backward(retain_graph=retain_graph)
        else:
            self.engine.backward(loss, retain_graph=retain_graph, weight=weight)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()

    def count(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        return xds.zero.GatheredParameters(list(params), modifier_rank=0)

    def uneven(self) -> AbstractContextManager[Any]:
        return self.engine.uneven_forwards()

    def value_of(self, param: nn.Parameter) -> Tensor:
        return xds.zero.get_full_param(param)

    def grad_of(self, param: nn.Parameter) -> Tensor:
        return xds.zero.get_full_grad(param)

    def load(self, state: dict[str, Tensor], *, by_module: bool) -> None:
        (self.net if by_module else self.engine).load_state_dict(state)

    def is_trained(self, param: nn.Parameter) -> bool:
        groups = param_groups(self.case, self.net)
        return groups is None or any(param is p for group in groups for p in group["params"])

    def optimizer_zero_grad(self) -> None:
        self.engine.optimizer.zero_grad()

    def save_and_go_on(self, stage: int | None = None) -> None:
        folder = _common_folder(self.rank)
        self.engine.save_checkpoint(folder)
        self.engine.destroy()
        if stage is not None:
            self.stage = stage
        self._open()  # with the values of the start: all that was learned must come from the files
        path, _ = self.engine.load_checkpoint(folder)
        assert path is not None and Path(path).parent == Path(folder)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)

    def go_elsewhere_and_back(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.engine.state_dict()
        return found

    def make_reference(self) -> None:
        frozen = build(self.case).requires_grad_(False)
        config = config_of(self.case, self.case.stage)
        config.pop("optimizer", None)
        self.reference = xds.initialize(frozen, config)

    def write(self, param: nn.Parameter, value: Tensor) -> None:
        xds.zero.set_full_param(param, value)

    def write_grad(self, param: nn.Parameter, value: Tensor) -> None:
        xds.zero.set_full_grad(param, value)

    def set_accumulation(self, steps: int) -> None:
        self.accumulation = steps
        each = self.engine.train_micro_batch_size_per_gpu() * self.engine.world_size
        self.engine.set_train_batch_size(each * steps)

    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups


def _optimizer(case: Case, net: Net, groups: Any) -> dict[str, Any]:
    """The arguments of `xds.initialize` that say what trains how."""
    kind = OPTIMIZERS[case.optimizer]
    if not kind.is_given and not case.has("OptimizerGiven"):
        return {"model_parameters": groups}
    if case.seed % 2:  # an object; the engine takes it over
        params = [p for p in net.parameters() if p.requires_grad] if groups is None else groups
        return {"optimizer": kind.plain(params, case.lr, case.weight_decay)}
    return {
        "optimizer": lambda found: kind.plain(found, case.lr, case.weight_decay),
        "model_parameters": groups,
    }


def config_of(case: Case, stage: int) -> dict[str, Any]:
    """The engine's config."""
    kind = OPTIMIZERS[case.optimizer]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.samples,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "zero_optimization": {"stage": stage, **case.zero},
    }
    if not kind.is_given and not case.has("OptimizerGiven"):
        params = {"lr": case.lr, "weight_decay": case.weight_decay, **kind.params}
        config["optimizer"] = {"type": kind.type, "params": params}
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    for feature in case.features:
        feature.configure(config)
    return config


def train(case: Case) -> dict[str, Any]:
    """Train on this rank, and tell what it saw. Every rank of a group of `case.world_size` calls it."""
    side = Sharded(case, dist.get_rank())
    for moment in script(side):
        if moment is Step.UPDATE:
            side.engine.step()
            side.norms.append(side.engine.get_global_grad_norm())
    return report(side)


def report(side: Sharded) -> dict[str, Any]:
    """What gets compared; the engine is destroyed."""
    values = {n: _own(side.value_of(p)) for n, p in side.net.named_parameters() if p.numel()}
    key = OPTIMIZERS[side.case.optimizer].state
    states = {}
    if key is not None:
        for name, param in side.net.named_parameters():
            if param.requires_grad and param.numel():
                try:
                    states[name] = _own(xds.zero.get_full_optimizer_state(param, key))
                except xds.UsageError:
                    continue  # left out of every group
    computed = {}
    side.engine.destroy()
    for name, param in side.net.named_parameters():
        computed[name] = _own(param)
    buffers = {n: _own(b) for n, b in side.net.named_buffers()}
    return {
        "seen": side.seen,
        "norms": side.norms,
        "params": values,
        "computed": computed,
        "states": states,
        "buffers": buffers,
    }


def _common_folder(rank: int) -> str:
    names = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names, 0)
    return names[0]


def _own(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32, copy=True)
