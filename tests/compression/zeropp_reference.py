"""Test helper: quantised gradients and weights of all ranks at once, and Adam in float64.

Wang et al., ZeRO++, 2023, sections 3.1 and 3.3; Xie et al., LoCo, 2024, algorithm 1. Rounding is that of the
reference ops in fp32, because float64 would round other elements the other way. All else is float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from xds.ops.kernels.quantize import (
    BLOCK_NUMEL,
    block_count,
    dequantize_reference,
    quantize_reference,
    value_bytes,
)

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def rounded(values: Tensor, bits: int) -> Tensor:
    """fp32 [n] as it arrives after it was sent in `bits` bits."""
    numel = values.numel()
    stored = torch.empty(value_bytes(numel, bits), dtype=torch.uint8)
    scales = torch.empty(block_count(numel, BLOCK_NUMEL))
    quantize_reference(values, stored, scales, None, bits, BLOCK_NUMEL)
    out = torch.empty(numel)
    dequantize_reference(stored[None], scales[None], out, bits, BLOCK_NUMEL, 1.0)
    return out


@dataclass
class Sums:
    """The sums over ranks of gradients that are sent in 4 bits. rank = host * length + place.

    beta: of LoCo; None without it.
    """

    num_ranks: int
    length: int
    beta: float | None = None
    errors: list[Tensor] = field(default_factory=list)

    def of(self, grads: list[Tensor]) -> Tensor:
        """grads: of each rank [n] in the sent dtype -> their sum [n]."""
        numel = grads[0].numel() // self.num_ranks
        if not self.errors:
            self.errors = [torch.zeros(grads[0].numel()) for _ in grads]
        parts = [
            self._send(rank, grad.float(), slice(owner * numel, (owner + 1) * numel))
            for owner in range(self.num_ranks)
            for rank, grad in enumerate(grads)
        ]
        found = []
        for owner in range(self.num_ranks):
            own = parts[owner * self.num_ranks : (owner + 1) * self.num_ranks]
            if self.length in (1, self.num_ranks):
                found.append(torch.stack(own).sum(0))
                continue
            place, here = owner % self.length, slice(owner * numel, (owner + 1) * numel)
            total = torch.zeros(numel)
            for host in range(self.num_ranks // self.length):
                partial = torch.zeros(numel)
                for values in own[host * self.length : (host + 1) * self.length]:
                    partial = partial + values
                sent = rounded(partial, 4)
                total = total + sent
                if self.beta is not None:
                    self.errors[host * self.length + place][here] += (1 - self.beta) * (
                        partial - sent
                    )
            found.append(total)
        return torch.cat(found)

    def _send(self, rank: int, grad: Tensor, here: slice) -> Tensor:
        if self.beta is None:
            return rounded(grad[here], 4)
        error = self.errors[rank][here]
        values = grad[here] + error
        sent = rounded(values, 4)
        self.errors[rank][here] = self.beta * error + (1 - self.beta) * (values - sent)
        return sent


@dataclass
class Adam:
    """AdamW of one vector in float64."""

    value: Tensor
    lr: float
    decay: float
    steps: int = 0

    def __post_init__(self) -> None:
        self.value = self.value.double()
        self.m, self.v = torch.zeros_like(self.value), torch.zeros_like(self.value)

    def step(self, grad: Tensor) -> None:
        """grad: the mean over ranks [n]."""
        self.steps += 1
        grad = grad.double()
        self.m = BETA1 * self.m + (1 - BETA1) * grad
        self.v = BETA2 * self.v + (1 - BETA2) * grad**2
        mean = self.m / (1 - BETA1**self.steps)
        root = (self.v / (1 - BETA2**self.steps)).sqrt() + EPS
        self.value = self.value * (1 - self.lr * self.decay) - self.lr * mean / root
