"""The speed of torch, eager and compiled, for operations that could get a native kernel.

xds has a native kernel only where it is faster than both. So each row is the faster of both relative to the
time of copying the bytes that must move, and its note gives the largest possible gain of a native kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from clock import COPY, COPY_BYTES, Clock
from harness import Row, ratio_row
from torch import Tensor
from torch.nn import functional as F


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.rms_norm(total, x.shape[-1:], weight)


def causal_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, float("-inf")).softmax(-1)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Candidate:
    """A function, its shapes (the first is the large one), and how often the large one's bytes must move."""

    fn: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    forward: int
    both: int  # forward and backward

    def name(self, what: str) -> str:
        return f"{self.fn.__name__} {'x'.join(map(str, self.shapes[0]))} {what}: torch / copy"


def _norms(fn: Callable[..., Tensor], *sizes: tuple[int, int]) -> Iterator[Candidate]:
    for rows, width in sizes:
        weights = ((width,),) * (2 if fn is layer_norm else 1)
        yield Candidate(fn, ((rows, width), *weights), 2, 5)


ALL = (
    *_norms(layer_norm, (65536, 768), (32768, 2048), (16384, 4096), (4096, 16384)),
    *_norms(rms_norm, (32768, 2048), (4096, 16384)),
    Candidate(add_rms_norm, ((16384, 4096), (16384, 4096), (4096,)), 4, 9),
    Candidate(causal_softmax, ((32, 2048, 2048), (2048, 2048)), 2, 5),
    Candidate(bias_gelu, ((16384, 16384), (16384,)), 2, 5),
    Candidate(swiglu, ((16384, 11008), (16384, 11008)), 3, 8),
    Candidate(rotary, ((8, 2048, 32, 128), (2048, 1, 128), (2048, 1, 128)), 2, 4),
    Candidate(cross_entropy, ((16384, 50304), (16384,)), 1, 2),
    Candidate(cross_entropy, ((16384, 128256), (16384,)), 1, 2),
)
WAYS = ("fwd", "fwd+bwd")


def names() -> Iterator[str]:
    """The names of all rows."""
    for candidate in ALL:
        for way in WAYS[candidate.fn is cross_entropy :]:
            yield candidate.name(way)


def inputs(candidate: Candidate, device: torch.device) -> list[Tensor]:
    """Random inputs, bf16; labels and masks where the function has them."""
    made = []
    for at, shape in enumerate(candidate.shapes):
        if candidate.fn is cross_entropy and at == 1:
            made.append(torch.randint(0, candidate.shapes[0][1], shape, device=device))
        elif candidate.fn is causal_softmax and at == 1:
            made.append(torch.ones(shape, dtype=torch.bool, device=device).triu(1))
        else:
            grads = candidate.fn is not rotary or at == 0
            made.append(
                torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_(grads)
            )
    return made


def forward(fn: Callable[..., object], given: list[Tensor]) -> object:
    with torch.no_grad():
        return fn(*given)


def both_ways(fn: Callable[..., object], given: list[Tensor], grads: list[Tensor]) -> object:
    result = fn(*given)
    results = list(result) if isinstance(result, tuple) else [result]
    wanted = [tensor for tensor in given if tensor.requires_grad]
    return torch.autograd.grad(results, wanted, grads)


def measure(clock: Clock, candidate: Candidate) -> Iterator[Row]:
    given = inputs(candidate, clock.device)
    torch.compiler.reset()
    fns = {"eager": candidate.fn, "compile": torch.compile(candidate.fn, dynamic=False)}
    result = forward(candidate.fn, given)
    results = result if isinstance(result, tuple) else (result,)
    grads = [torch.randn_like(one) for one in results]
    del result, results
    for way in WAYS[candidate.fn is cross_entropy :]:
        passes = candidate.forward if way == "fwd" else candidate.both
        rest = () if way == "fwd" else (grads,)
        run = forward if way == "fwd" else both_ways
        times = clock.turns({name: partial(run, fn, given, *rest) for name, fn in fns.items()})
        size_bytes = passes * given[0].nbytes
        floor = [ms * size_bytes / COPY_BYTES for ms in times[COPY]]
        median = {name: statistics.median(times[name]) for name in fns}
        best = min(median, key=lambda name: median[name])
        row = ratio_row(candidate.name(way), times[best], floor)
        shares = {name: statistics.median(floor) / ms for name, ms in median.items()}
        row.note = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        row.note += f" of copy; own could gain {row.value:.2f}x"
        yield row


def rows(clock: Clock) -> Iterator[Row]:
    """Every row of this file. Rows for which the time is too short are marked as skipped."""
    for candidate in ALL:
        if clock.is_over:
            for way in WAYS[candidate.fn is cross_entropy :]:
                yield Row(candidate.name(way), void="not measured", note="out of time")
            continue
        try:
            yield from measure(clock, candidate)
        except torch.OutOfMemoryError:
            yield Row(candidate.name("all"), void="not measured", note="out of memory")
        torch.cuda.empty_cache()
