"""Plain PyTorch: one process, a replica of the model for each rank, gradients averaged by hand.

A replica each, not one model for all ranks: what forward writes (running statistics, a teacher's weights)
is written once on each rank. In 16 bits replicas compute in that dtype, and the optimizer has fp32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case
from .compare import ROUNDING
from .groups import param_groups
from .model import build
from .optimizers import OPTIMIZERS
from .script import Step, script
from .side import LOSS_SCALE, Side


class Plain(Side):
    """One rank's replica."""

    def __init__(self, case: Case, rank: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(case, rank)
        self.dtype = dtype or self.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.is_beyond = (
            False  # what this rank would send is not finite in the dtype that it is sent in
        )
        self.net = build(case).to(self.dtype)
        # a power of 2: nothing changes but what is out of range
        self.loss_scale = LOSS_SCALE if case.precision == "fp16" else 1.0
        self.named = dict(self.net.named_parameters())
        self.masters: dict[str, Tensor] = {}
        groups = param_groups(case, self.net) or [{"params": list(self.net.parameters())}]
        names = {id(param): name for name, param in self.named.items()}
        for group in groups:
            own = [names[id(p)] for p in group["params"] if p.is_floating_point()]
            group["params"] = [self._master(name) for name in own]
        kind = OPTIMIZERS[case.optimizer]
        self.optimizer = kind.plain(groups, case.lr, case.weight_decay)
        self.sums: dict[str, Tensor] = {}
        self.weight = 0.0  # of the micro-batches since the last step
        self.averaged: dict[str, Tensor] = {}
        self.written_grads: dict[str, Tensor] = {}
        for feature in case.features:
            feature.initialized(self)

    def _master(self, name: str) -> Tensor:
        param = self.named[name]
        is_low = self.dtype in (torch.float16, torch.bfloat16)
        self.masters[name] = param.detach().float().clone() if is_low else param
        return self.masters[name]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with autocast_of(self.case):
            return self.net(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        bare: bool = False,
        weight: float | None = None,
    ) -> None:
        if weight is None:
            scaled = loss / self.accumulation * self.loss_scale
        else:
            self.weight += weight
            scaled = loss * (weight * self.loss_scale)
        torch.autograd.backward(scaled, retain_graph=retain_graph)
        self.collect()

    def collect(self) -> None:
        """Take what autograd left; sums over micro-batches are in fp32."""
        for name, param in self.named.items():
            if param.grad is not None and name in self.masters:
                grad = param.grad.to(self.wide) / self.loss_scale
                self.sums[name] = self.sums.get(name, 0) + grad
            param.grad = None

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def count(self) -> None:
        pass

    def zero_grad(self) -> None:
        self.sums, self.weight = {}, 0.0
        for param in self.named.values():
            param.grad = None  # of a backward that raised

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def uneven(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def value_of(self, param: nn.Parameter) -> Tensor:
        self.adopt()
        name = next(n for n, p in self.named.items() if p is param)
        return self.masters.get(name, param).detach().clone()

    def grad_of(self, param: nn.Parameter) -> Tensor:
        name = next(n for n, p in self.named.items() if p is param)
        return self.written_grads.get(name, self.averaged[name])

    def load(self, state: dict[str, Tensor], *, by_module: bool) -> None:
        self.net.load_state_dict(state)

    def is_trained(self, param: nn.Parameter) -> bool:
        return any(self.named[name] is param for name in self.trained())

    def optimizer_zero_grad(self) -> None:
        pass

    def save_and_go_on(self, stage: int | None = None) -> None:
        pass

    def go_elsewhere_and_back(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    def make_reference(self) -> None:
        self.reference = build(self.case).to(self.dtype).requires_grad_(False)

    def write(self, param: nn.Parameter, value: Tensor) -> None:
        name = next(n for n, p in self.named.items() if p is param)
        with torch.no_grad():
            param.copy_(value)
            if name in self.masters:
                self.masters[name].detach().copy_(value)

    def write_grad(self, param: nn.Parameter, value: Tensor) -> None:
        name = next(n for n, p in self.named.items() if p is param)
        self.written_grads[name] = value

    def set_accumulation(self, steps: int) -> None:
        self.accumulation = steps

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def adopt(self) -> None:
        """A parameter that somebody wrote is the new master; what did not change keeps its full precision."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return
        for name, master in self.masters.items():
            param = self.named[name].detach()
            master.copy_(torch.where(param != master.to(self.dtype), param.float(), master))

    @torch.no_grad()
    def update(self, grads: dict[str, Tensor]) -> None:
        self.adopt()
        for name, master in self.masters.items():
            master.grad = grads.get(name)
        self.optimizer.step()
        for name, master in self.masters.items():
            master.grad = None
            if master is not self.named[name]:
                self.named[name].copy_(master)
        self.sums, self.weight = {}, 0.0

    def trained(self) -> dict[str, Tensor]:
        """The masters of what trains now: what was frozen later is left alone, as by PyTorch."""
        return {n: m for n, m in self.masters.items() if self.named[n].requires_grad}


EXACT = -1  # the "noise" of fp64: its result differs by what all roundings of fp32 make


def train(case: Case, noise: int = 0) -> list[dict[str, Any]]:
    """Train, and tell what each rank saw. With `noise`, its seed, gradients are wrong by about a rounding."""
    random = torch.Generator().manual_seed(max(noise, 0))
    dtype = torch.float64 if noise == EXACT else None
    sides = [Plain(case, rank, dtype) for rank in range(case.world_size)]
    scripts: list[Iterator[Step]] = [script(side) for side in sides]
    while True:
        moments = [next(one, None) for one in scripts]
        if moments[0] is None:
            return [report(side) for side in sides]
        if moments[0] is Step.AVERAGE:
            average(sides)
        else:
            step(sides, random if noise > 0 else None)


def rounded_otherwise(case: Case, grad: Tensor, random: torch.Generator) -> Tensor:
    """About a rounding off: of each element, and, for what cancels out, of a typical one."""
    one = ROUNDING["bf16" if case.has("Autocast") else case.precision]
    typical = grad.square().mean().sqrt() if grad.numel() else 0.0
    return grad + one * (grad.abs() + typical) * torch.randn(grad.shape, generator=random)


def average(sides: list[Plain]) -> None:
    """The mean, over weights if there are some; what no rank used counts as zeros, as in a flat buffer."""
    divisor = sum(side.weight for side in sides) or len(sides)
    for side in sides:
        if side.dtype == torch.float16:
            sizes = [one.abs().max().item() for one in side.sums.values() if one.numel()]
            most = max(sizes, default=0.0)
            side.is_beyond |= not most * side.loss_scale <= torch.finfo(torch.float16).max
        side.averaged = {
            name: sum(s.sums.get(name, torch.zeros_like(master, dtype=s.wide)) for s in sides)
            / divisor
            for name, master in side.trained().items()
        }


def step(sides: list[Plain], random: torch.Generator | None) -> None:
    """One optimizer step on every replica."""
    case = sides[0].case
    average(sides)
    if random is not None:
        found = sides[0].averaged
        noisy = {name: rounded_otherwise(case, grad, random) for name, grad in found.items()}
        for side in sides:
            side.averaged = dict(noisy)
    for side in sides:
        side.averaged.update(side.written_grads)
        side.written_grads = {}
        grads = {name: grad.clone() for name, grad in side.averaged.items()}
        norm = torch.sqrt(sum((g.double().square().sum() for g in grads.values()), torch.zeros(())))
        side.norms.append(norm.item())
        if case.clipping and norm > case.clipping:
            grads = {
                name: grad * (case.clipping / (norm + 1e-6)).float() for name, grad in grads.items()
            }
        side.update(grads)


def autocast_of(case: Case) -> AbstractContextManager[Any]:
    """What the config's section torch_autocast means."""
    return torch.autocast("cpu", torch.bfloat16) if case.has("Autocast") else nullcontext()


def report(side: Plain) -> dict[str, Any]:
    """What gets compared."""
    side.adopt()
    values = {n: side.masters.get(n, p).detach().float().clone() for n, p in side.named.items()}
    key = OPTIMIZERS[side.case.optimizer].state
    states = {}
    if key is not None:
        for name, master in side.trained().items():
            if key in side.optimizer.state.get(master, {}):
                states[name] = side.optimizer.state[master][key].detach().float().clone()
    buffers = {n: b.detach().float().clone() for n, b in side.net.named_buffers()}
    return {
        "seen": side.seen,
        "norms": side.norms,
        "params": values,
        "states": states,
        "buffers": buffers,
        "is_beyond": side.is_beyond,
    }
