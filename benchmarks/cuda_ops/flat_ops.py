"""The ops of xds over flat tensors: optimizers, the norm, block quantisation, packed signs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from clock import Clock
from harness import Row, Skip, ratio_row
from torch import Tensor

from xds.ops.kernels import quantize, signs
from xds.ops.kernels.adam import adam_
from xds.ops.kernels.lion import lion_
from xds.ops.kernels.square_sum import square_sum

HYPER = (1e-3, 0.9, 0.999, 1e-8, 0.01, True, True)  # lr, betas, eps, decay, decoupled, correction
BF16, FP32, BYTE = torch.bfloat16, torch.float32, torch.uint8
# name of a row without " / peer", and its targets: shown where nothing can be measured
ROWS = (
    ("AdamW fp32, one flat shard: xds / copy", 1 / 0.90),
    ("AdamW fp32, one flat shard: xds / torch fused", 1.0),
    ("AdamW fp32, one flat shard: xds / DeepSpeed", 1.0),
    ("AdamW fp32, 40 flat shards: xds / copy", 1 / 0.90),
    ("unscale+clip+step+cast: xds / copy", 1 / 0.90),
    ("unscale+clip+step+cast: xds / torch fused", 1 / 1.3),
    ("norm+unscale+clip+step+cast / step alone", 1.35),
    ("Lion bf16 gradient and out: xds / copy", 1 / 0.90),
    ("square_sum fp32: xds / copy", 1 / 0.90),
    ("square_sum bf16: xds / copy", 1 / 0.90),
    *((f"{way} int{bits}, {what}: xds / copy", 1 / 0.80)
      for way, what in (("quantise", "bf16"), ("quantise", "bf16 with feedback"),
                        ("dequantise", "to bf16"), ("dequantise", "8 parts to bf16"))
      for bits in (8, 4)),
    *((f"{what}: xds / copy", 1 / 0.80)
      for what in ("sign pack, fp32 with feedback", "sign pack, one scale", "sign unpack to fp32",
                   "sign unpack, 8 parts to fp32")),
)  # fmt: skip


class State:
    """A master, its gradient and moments, of 1e9 elements where memory allows."""

    def __init__(self, clock: Clock) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.numel = min(10**9, int(free * 0.6 / 28) // 4096 * 4096)
        like = {"device": clock.device, "dtype": FP32}
        self.param = torch.randn(self.numel, **like)
        self.grad = torch.randn(self.numel, **like)
        self.mean = torch.randn(self.numel, **like)
        self.square = torch.rand(self.numel, **like)
        self.narrow_grad, self.out = self.grad.to(BF16), self.param.to(BF16)
        self.step = torch.full((), 10.0, **like)
        self.scale = torch.full((), 1 / 128, **like)
        self.divisor = torch.full((), 128.0, **like)
        self.no_inf = torch.zeros((), **like)

    def adam(self, cut: slice = slice(None), *, all_in_one: bool = False) -> None:
        grad = self.narrow_grad if all_in_one else self.grad
        adam_(
            *(t[cut] for t in (self.param, grad, self.mean, self.square)),
            self.out[cut] if all_in_one else None,
            self.step,
            self.scale if all_in_one else None,
            self.no_inf if all_in_one else None,
            *HYPER,
        )

    def in_shards(self, count: int) -> None:
        width = -(-self.numel // count // 4) * 4
        for at in range(count):
            self.adam(slice(at * width, (at + 1) * width))

    def torch_fused(self, *, all_in_one: bool = False) -> None:
        """torch's fused AdamW, with the casts that a bf16 gradient and bf16 parameters need around it."""
        grad = self.narrow_grad.float() if all_in_one else self.grad
        torch._fused_adamw_(
            *([t] for t in (self.param, grad, self.mean, self.square)),
            [],
            [self.step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=self.divisor if all_in_one else None,
            found_inf=self.no_inf if all_in_one else None,
        )
        if all_in_one:
            self.out.copy_(self.param)

    def with_norm(self) -> None:
        norm = square_sum(self.narrow_grad).sqrt()
        self.scale.copy_(torch.clamp(1.0 / (norm / 128 + 1e-6), max=1.0) / 128)
        self.adam(all_in_one=True)

    def deepspeed(self) -> Callable[[], object]:
        try:
            from deepspeed.ops.adam import FusedAdam

            master = torch.nn.Parameter(self.param)
            master.grad = self.grad
            optimizer = FusedAdam([master], lr=1e-3, weight_decay=0.01)
            optimizer.step()
            return optimizer.step
        except Exception as error:  # not installed, or its op does not build
            raise Skip(f"{type(error).__name__}: {error}".splitlines()[0][:90]) from error


def is_right(state: State) -> str:
    """ "" if a step of xds equals torch's on a sample; else the difference."""
    sample = State.__new__(State)
    ours, theirs = [], []
    for kept, run in ((ours, State.adam), (theirs, State.torch_fused)):
        sample.__dict__ = {
            name: value[:1_000_003].clone() if isinstance(value, Tensor) and value.dim() else value
            for name, value in state.__dict__.items()
        }
        run(sample)
        kept += [sample.param, sample.mean, sample.square]
    gap = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    return "" if gap < 1e-6 else f"VOID: {gap:.1e} apart"


def optimizer_rows(clock: Clock) -> Iterator[Row]:
    state = State(clock)
    numel, void = state.numel, is_right(state)
    contestants: dict[str, Callable[[], object]] = {"xds": state.adam, "torch": state.torch_fused}
    peer = ""
    try:
        contestants["deepspeed"] = state.deepspeed()
    except Skip as reason:
        peer = str(reason)
    times = clock.turns(contestants)
    name = "AdamW fp32, one flat shard"
    row = clock.against_copy(name, times, "xds", 28 * numel, 0.90)
    row.aim, row.void = 1 / 0.95, void
    row.note += f"; {numel / 1e9:.2f}e9 parameters"
    yield row
    yield ratio_row(f"{name}: xds / torch fused", times["xds"], times["torch"], must=1.0, void=void)
    if peer:
        yield Row(f"{name}: xds / DeepSpeed", must=1.0, void="SKIP", note=peer)
    else:
        yield ratio_row(f"{name}: xds / DeepSpeed", times["xds"], times["deepspeed"], must=1.0)

    times = clock.turns({"xds": partial(state.in_shards, 40)})
    yield clock.against_copy("AdamW fp32, 40 flat shards", times, "xds", 28 * numel, 0.90)

    times = clock.turns(
        {
            "xds": partial(state.adam, all_in_one=True),
            "torch": partial(state.torch_fused, all_in_one=True),
            "norm": state.with_norm,
            "alone": state.adam,
        }
    )
    name = "unscale+clip+step+cast"
    yield clock.against_copy(name, times, "xds", 28 * numel, 0.90)
    yield ratio_row(f"{name}: xds / torch fused", times["xds"], times["torch"], must=1 / 1.3)
    yield ratio_row(
        "norm+unscale+clip+step+cast / step alone", times["norm"], times["alone"], must=1.35
    )

    def lion() -> None:
        lion_(
            *(state.param, state.narrow_grad, state.mean, state.out, state.scale, None),
            *(1e-4, 0.9, 0.99, 0.01),
        )

    times = clock.turns({"xds": lion})
    yield clock.against_copy("Lion bf16 gradient and out", times, "xds", 20 * numel, 0.90)
    for dtype, flat in (("fp32", state.grad), ("bf16", state.narrow_grad)):
        times = clock.turns({"xds": partial(square_sum, flat)})
        yield clock.against_copy(f"square_sum {dtype}", times, "xds", flat.nbytes, 0.90)


def quantize_rows(clock: Clock, numel: int) -> Iterator[Row]:
    block = quantize.BLOCK_NUMEL
    flat = torch.randn(numel, device=clock.device, dtype=BF16)
    out = torch.empty_like(flat)
    error = torch.zeros(numel, device=clock.device)
    for bits in (8, 4):
        # rows of whole blocks, so that every part begins at an aligned address
        values = torch.empty(quantize.value_bytes(numel, bits), dtype=BYTE, device=clock.device)
        absmax = torch.empty(quantize.block_count(numel, block), device=clock.device)
        wire = values.nbytes + absmax.nbytes
        q, d = quantize.quantize_, quantize.dequantize_
        times = clock.turns(
            {
                "plain": partial(q, flat, values, absmax, None, bits, block),
                "feedback": partial(q, flat, values, absmax, error, bits, block),
                "back": partial(d, values[None], absmax[None], out, bits, block, 1.0),
            }
        )
        many_numel = numel // 8
        width = quantize.value_bytes(many_numel, bits)
        many = values[: 8 * width].view(8, width)
        blocks = quantize.block_count(many_numel, block)
        many_absmax = absmax[: 8 * blocks].view(8, blocks)
        some_out = out[:many_numel]
        times |= clock.turns({"parts": partial(d, many, many_absmax, some_out, bits, block, 0.125)})
        for who, name, size_bytes in (
            ("plain", f"quantise int{bits}, bf16", flat.nbytes + wire),
            ("feedback", f"quantise int{bits}, bf16 with feedback", flat.nbytes + wire + 8 * numel),
            ("back", f"dequantise int{bits}, to bf16", flat.nbytes + wire),
            ("parts", f"dequantise int{bits}, 8 parts to bf16", some_out.nbytes + wire),
        ):
            row = clock.against_copy(name, times, who, size_bytes, 0.80)
            row.name = f"{name}: xds / copy"
            yield row


def sign_rows(clock: Clock, numel: int) -> Iterator[Row]:
    block = signs.BLOCK_NUMEL
    value = torch.randn(numel, device=clock.device)
    error, out = torch.zeros_like(value), torch.empty_like(value)
    bits = torch.empty(signs.sign_bytes(numel), dtype=BYTE, device=clock.device)
    scales = torch.empty(signs.scale_count(numel, block), device=clock.device)
    some = numel // 8
    width, count = signs.sign_bytes(some), signs.scale_count(some, block)
    parts = (bits[: 8 * width].view(8, width), scales[: 8 * count].view(8, count), out[:some])
    pack, unpack = signs.sign_pack_, signs.sign_unpack_
    times = clock.turns(
        {
            "pack": partial(pack, value, error, bits, scales, block, False),
            "one": partial(pack, value, error, bits, scales[:1], 0, True),
            "back": partial(unpack, bits[None], scales[None], out, block, 1.0),
            "parts": partial(unpack, *parts, block, 0.125),
        }
    )
    wire = bits.nbytes + scales.nbytes
    for who, name, size_bytes in (
        ("pack", "sign pack, fp32 with feedback", 12 * numel + wire),
        ("one", "sign pack, one scale", 20 * numel + bits.nbytes),
        ("back", "sign unpack to fp32", 4 * numel + wire),
        ("parts", "sign unpack, 8 parts to fp32", 4 * some + wire),
    ):
        row = clock.against_copy(name, times, who, size_bytes, 0.80)
        row.name = f"{name}: xds / copy"
        if who == "back":
            both = statistics.median(times["pack"]) + statistics.median(times["back"])
            row.note += f"; pack and unpack {both:.2f} ms"
        yield row


def rows(clock: Clock) -> Iterator[Row]:
    """Every row of this file."""
    yield from optimizer_rows(clock)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    numel = min(10**9, int(free * 0.5 / 16)) // 8192 * 8192
    yield from quantize_rows(clock, numel)
    torch.cuda.empty_cache()
    yield from sign_rows(clock, numel)
