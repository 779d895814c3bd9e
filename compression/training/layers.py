"""Layers that compute with quantized and pruned weights. Their parameters stay whole, under their own names.

    weight ──> quantized ──> masked: sparse, rows, heads or channels ──> forward of the layer
    input  ──> quantized ──────────────────────────────────────────────┘

A layer keeps its parameters and gets another class, which derives from its own. Weights are compressed inside
of forward, where stage 3 has gathered them. Masks of the method l1 are buffers; scores of topk are parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import EVERY, WeightShared
from .quantizers import learned_mask, noise_like, quantized, top_mask
from .schedule import Falling

MOMENTUM = 0.95  # of running ranges of activations
RANGE = "x_min_max"
SEED = "noise_seed"

# names of DeepSpeed: a technique -> (mask of l1, scores of topk)
STATES = {
    "sparse_pruning": ("sparse_pruning_mask", "sparse_mask_scores"),
    "row_pruning": ("row_pruning_mask", "row_mask_scores"),
    "head_pruning": ("head_pruning_mask", "head_pruning_scores"),
    "channel_pruning": ("channel_pruning_mask", "channel_mask_scores"),
}
# what a technique can compress; Conv1D of transformers counts as a linear layer
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "weight_quantization": (nn.Linear, nn.Conv2d, nn.Embedding),
    "activation_quantization": (nn.Linear, nn.Conv2d),
    "sparse_pruning": (nn.Linear, nn.Conv2d),
    "row_pruning": (nn.Linear,),
    "head_pruning": (nn.Linear,),
    "channel_pruning": (nn.Conv2d,),
}


class CompressedLayer(nn.Module):
    """A layer with techniques, which `advance` switches on."""

    weight: Any  # the class beside this one declares it
    # technique -> (shared_parameters, parameters of its group)
    settings: dict[str, tuple[Any, Any]]
    active: tuple[str, ...]
    step: int  # of the last `advance`; -1 before the first
    weight_bits: int
    whole_share: float  # of the weight in the mean with the quantized one

    def begin(self, settings: Mapping[str, tuple[Any, Any]]) -> None:
        """Add what the techniques need: masks, scores, ranges. No technique is on."""
        self.settings = dict(settings)
        self.active, self.step, self.weight_bits, self.whole_share = (), -1, 0, 0.0
        device = torch.device("cpu") if self.weight.is_meta else self.weight.device
        for name, (shared, _) in settings.items():
            if name == "activation_quantization" and shared.range_calibration == "static":
                self.register_buffer(RANGE, torch.zeros(2, device=device))
            if name == "weight_quantization" and _is_stochastic(shared):
                seed = torch.zeros((), dtype=torch.int64, device=device)
                self.register_buffer(SEED, seed, persistent=False)
            if name not in STATES:
                continue
            mask, scores = STATES[name]
            shape = self.mask_shape(name)
            if shared.method == "l1":
                self.register_buffer(mask, torch.ones(shape, dtype=torch.bool, device=device))
                continue
            given = torch.empty(shape, device=device, dtype=self.weight.dtype)
            # kaiming_uniform_ with a = sqrt(5), whose fan of [heads] and [rows, 1] is DeepSpeed's
            nn.init.kaiming_uniform_(given, a=math.sqrt(5))
            self.register_parameter(scores, nn.Parameter(given))

    def mask_shape(self, technique: str) -> tuple[int, ...]:
        """The shape of a mask, which multiplies the weight after `_over_weight`."""
        whole = self.matrix_shape
        if technique == "sparse_pruning":
            return whole
        if technique == "head_pruning":
            return (1, int(self.settings[technique][0].num_heads))
        return (whole[0], *(1 for _ in whole[1:]))

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the weight, with outputs first."""
        return tuple(self.weight.shape)

    def matrix(self, weight: Tensor) -> Tensor:
        """`weight` with outputs first."""
        return weight

    # -- the schedule -------------------------------------------------------------------------------------

    def advance(self, step: int) -> None:
        """Be in the state after `step` optimizer steps. It needs no earlier state but that of masks."""
        self.step = step
        self.active = tuple(
            name for name, (shared, _) in self.settings.items() if step >= shared.schedule_offset
        )
        if "weight_quantization" not in self.active:
            self.weight_bits, self.whole_share = 0, 0.0
            return
        shared, params = self.settings["weight_quantization"]
        self.weight_bits, self.whole_share = params.target_bits, 0.0
        if not shared.quantize_weight_in_forward:
            mixed = shared.fp16_mixed_quantize
            change = mixed.quantize_change_ratio if mixed.enabled else 0.0
            falling = Falling(
                params.start_bits, params.target_bits, params.quantization_period, change
            )
            steps = step - shared.schedule_offset + 1
            self.weight_bits, self.whole_share = falling.at(steps)
        if SEED in self._buffers:
            getattr(self, SEED).fill_(step)

    def due(self, before: int, step: int) -> list[str]:
        """The techniques whose l1 masks are computed between two numbers of steps; `before` is -1 at first."""
        found = []
        for name, (shared, _) in self.settings.items():
            if name in STATES and shared.method == "l1":
                start = 0 if shared.mask_at_init else shared.schedule_offset
                if before < start <= step:
                    found.append(name)
        return found

    @torch.no_grad()
    def set_mask(self, technique: str, weight: Tensor) -> None:
        """Keep the largest parts of `weight`, the whole value of the parameter.

        Shapes: that of the parameter. Equal parts: the first is kept.
        """
        values = self.matrix(weight)
        if values.dtype.itemsize < 4:
            values = values.float()  # sums of fp16 may be infinite
        ratio = self.settings[technique][1].dense_ratio
        if technique == "sparse_pruning":
            sizes = values.abs()
        elif technique == "head_pruning":
            heads = self.mask_shape(technique)[1]
            sizes = values.abs().sum(dim=0).view(heads, -1).sum(dim=1)
        else:
            sizes = values.reshape(values.shape[0], -1).abs().sum(dim=1)
        mask: Tensor = getattr(self, STATES[technique][0])
        mask.copy_(top_mask(sizes, ratio).view(mask.shape))

    # -- forward ------------------------------------------------------------------------------------------

    def mask_of(self, technique: str) -> Tensor:
        """The mask now, of the shape `mask_shape`: bool, or of the dtype of its scores."""
        mask, scores = STATES[technique]
        if self.settings[technique][0].method == "l1":
            found: Tensor = getattr(self, mask)
            return found
        return learned_mask(getattr(self, scores), self.settings[technique][1].dense_ratio)

    def compressed(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight (outputs first) and bias as this step computes with them."""
        weight = self._quantized(self.matrix(weight))
        for name in self.active:
            if name not in STATES:
                continue
            mask = self.mask_of(name)
            if name == "head_pruning":
                mask = mask.repeat_interleave(weight.shape[1] // mask.shape[1], dim=1)
            elif name != "sparse_pruning" and bias is not None:
                bias = bias * mask.view(-1)
            weight = weight * mask
        return weight, bias

    def _quantized(self, weight: Tensor) -> Tensor:
        if not self.weight_bits:
            return weight
        shared = self.settings["weight_quantization"][0]
        noise = None
        if SEED in self._buffers and self.weight_bits > 2:
            noise = noise_like(weight, getattr(self, SEED))
        found = quantized(
            weight,
            self.weight_bits,
            groups=self.quantize_groups(shared),
            is_symmetric=shared.quantization_type == "symmetric",
            noise=noise,
        )
        if self.whole_share:
            return self.whole_share * weight + (1 - self.whole_share) * found
        return found

    def quantize_groups(self, shared: WeightShared) -> int:
        """The groups of the weight that have a scale each."""
        return shared.quantize_groups

    def quantized_input(self, x: Tensor, groups: int) -> Tensor:
        """The input as this step computes with it. groups: its parts, which have dynamic ranges."""
        if "activation_quantization" not in self.active:
            return x
        shared, params = self.settings["activation_quantization"]
        is_symmetric = shared.quantization_type == "symmetric"
        if shared.range_calibration == "dynamic":
            return quantized(x, params.bits, groups=groups, is_symmetric=is_symmetric)
        if self.training:
            self._observe(x.detach())
        low, high = getattr(self, RANGE).unbind()
        return quantized(x, params.bits, is_symmetric=is_symmetric, bounds=(low, high))

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        """Move the running range towards that of `x`; the first one is taken as it is."""
        if not x.numel():
            return
        seen: Tensor = getattr(self, RANGE)
        now = torch.stack([x.amin(), x.amax()]).to(seen.dtype)
        before = torch.where(seen[0] == seen[1], now, seen)
        seen.copy_(before * MOMENTUM + now * (1 - MOMENTUM))

    def extra_repr(self) -> str:
        techniques = ", ".join(self.settings)
        return f"{super().extra_repr()}, compressed by {techniques}"


def _is_stochastic(shared: WeightShared) -> bool:
    return shared.rounding == "stochastic" and not shared.quantize_weight_in_forward


def _tokens(x: Tensor) -> int:
    return x.shape[:-1].numel()


@final
class CompressedLinear(CompressedLayer, nn.Linear):
    """nn.Linear with compressed weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.compressed(self.weight, self.bias)
        return F.linear(self.quantized_input(x, _tokens(x)), weight, bias)


@final
class CompressedConv2d(CompressedLayer, nn.Conv2d):
    """nn.Conv2d with compressed weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.compressed(self.weight, self.bias)
        images = x.shape[0] if x.dim() == 4 else 1
        result: Tensor = self._conv_forward(self.quantized_input(x, images), weight, bias)
        return result


@final
class CompressedEmbedding(CompressedLayer, nn.Embedding):
    """nn.Embedding with quantized rows."""

    def quantize_groups(self, shared: WeightShared) -> int:
        if shared.quantize_weight_in_forward:
            return self.num_embeddings
        return shared.quantize_groups

    def forward(self, x: Tensor) -> Tensor:
        weight, _ = self.compressed(self.weight, None)
        return F.embedding(
            x,
            weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


def _transposed_forward(self: Any, x: Tensor) -> Tensor:
    weight, bias = self.compressed(self.weight, self.bias)
    return F.linear(self.quantized_input(x, _tokens(x)), weight, bias)


def _transposed_shape(self: Any) -> tuple[int, ...]:
    return tuple(self.weight.shape[::-1])


def _transposed(self: Any, weight: Tensor) -> Tensor:
    return weight.t()


def compressed_class(kind: type) -> type | None:
    """The class of a compressed layer for a layer of exactly this class; None: it cannot be compressed."""
    return _compressed_class(kind)


@cache
def _compressed_class(kind: Any) -> type | None:
    known = {
        nn.Linear: CompressedLinear,
        nn.Conv2d: CompressedConv2d,
        nn.Embedding: CompressedEmbedding,
    }
    if kind in known or not is_conv1d(kind):
        return known.get(kind)
    names = {  # transformers' Conv1D: its weight is [inputs, outputs]
        "forward": _transposed_forward,
        "matrix": _transposed,
        "matrix_shape": property(_transposed_shape),
        "__module__": __name__,
    }
    return type("CompressedConv1D", (CompressedLayer, kind), names)


def is_conv1d(kind: type) -> bool:
    """The class is Conv1D of transformers."""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers")


def matching(model: nn.Module, pattern: str, kinds: Sequence[type[nn.Module]]) -> list[str]:
    """Names of the layers of these kinds that a pattern finds, in the order of the model."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, tuple(kinds)) or (nn.Linear in kinds and is_linear(module)))
        and (pattern == EVERY or re.search(pattern, name))
    ]


def is_linear(module: nn.Module) -> bool:
    """A linear layer, or Conv1D of transformers, compressed or not."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Conv1D of transformers, whose weight is [inputs, outputs], compressed or not."""
    return any(is_conv1d(kind) for kind in type(module).__mro__)


def plain_class(layer: CompressedLayer) -> type:
    """The class that the layer had before."""
    return next(k for k in type(layer).__mro__ if compressed_class(k) is type(layer))


__all__ = [
    "KINDS",
    "STATES",
    "CompressedConv2d",
    "CompressedEmbedding",
    "CompressedLayer",
    "CompressedLinear",
    "compressed_class",
    "is_conv1d",
    "is_transposed",
    "matching",
    "plain_class",
]
