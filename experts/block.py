"""The forward of a block whose experts are in an nn.ModuleList on several ranks.

    router -> choice and weights by the block's convention -> the experts, on their ranks -> + shared experts

The block's own forward would call each expert of the list, and this rank has some of them only.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, nn

from ..utils.errors import UsageError
from .conventions import Block, Convention, bias_of, logits_in
from .cut import Found
from .layer import ExpertLayer, Forward, stand_in

if TYPE_CHECKING:
    from .expected import ExpectedLayer

Layer = TypeVar("Layer", "ExpertLayer", "ExpectedLayer")


@final
class ExpertBlock:
    """One block with a list of experts."""

    def __init__(
        self,
        block: Block,
        convention: Convention,
        layer: ExpertLayer | ExpectedLayer,
        setting: str,
    ) -> None:
        """layer: of its experts. setting: see there."""
        self._block, self._convention, self._setting = block, convention, setting
        self._experts = layer.rerouted(weighted_sum)
        self.call_experts = partial(self._experts, block.module.get_submodule(block.experts))
        own = inspect.signature(type(block.module).forward).parameters
        self._input = list(own)[1]  # the name of its first argument

    def rerouted(self, forward: Forward) -> Forward:
        """A forward in place of the block's own."""

        def sent(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            hidden, *others = args or (kwargs.pop(self._input, None),)
            given = [value for value in (*others, *kwargs.values()) if value is not None]
            if given or not isinstance(hidden, Tensor):
                raise UsageError(
                    f"{self._setting}: {self._block.name} is called with more or less than one tensor "
                    f"{self._input}; call it so, or leave it out with expert_parallel.moe_layer_pattern"
                )
            return _computed(self._block, self._convention, self._experts, module, hidden)

        return sent


def rerouting(found: Found, layer: Layer, setting: str) -> Layer | ExpertBlock:
    """What has the forward in place of the module's own: the layer of its experts, or the block around it."""
    if found.block is None or found.convention is None:
        return layer
    return ExpertBlock(found.block, found.convention, layer, setting)


def block_stand_in(block: Block, convention: Convention) -> Forward:
    """A forward in place of the block's own, which reads no expert."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return _computed(block, convention, stand_in, module, hidden)

    return forward


def _computed(
    block: Block, convention: Convention, experts: Forward, module: nn.Module, hidden: Tensor
) -> Any:
    """What the forward of `module`, which is `block` or a copy of it, computes with `experts`."""
    shape = hidden.shape
    tokens = hidden.reshape(-1, shape[-1])
    child = module.get_submodule
    output = child(block.router)(tokens if convention.is_flat else hidden)
    bias = None if block.bias is None else bias_of(module, block.bias)
    index, weights = convention.choose(output, bias)
    result = experts(child(block.experts), tokens, index, weights.to(tokens.dtype))
    for name in block.shared if convention.has_shared else ():
        shared = child(name)(tokens)
        if convention.has_gate and block.gate is not None:
            shared = torch.sigmoid(child(block.gate)(tokens)) * shared
        result = result + shared
    result = result.reshape(shape)
    if convention.form is None:
        return result
    logits = logits_in(output)
    parts = {"output": result, "logits": logits}
    return tuple(_with_dims(parts[kind], shape, num_dims) for kind, num_dims in convention.form)


def _with_dims(value: Tensor | None, shape: torch.Size, num_dims: int) -> Tensor:
    """`value` with tokens in as many dimensions as the block itself returns."""
    assert value is not None
    tokens = shape[:-1] if num_dims == len(shape) else (shape[:-1].numel(),)
    return value.reshape(*tokens, value.shape[-1])


def weighted_sum(
    experts: nn.ModuleList, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The sum of weight x output of each token's experts [T, H]. An expert without tokens is not called."""
    number, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(number, minlength=len(experts)).tolist()
    tokens = hidden_states.repeat_interleave(top_k_index.shape[1], 0).index_select(0, order)
    outputs = [
        experts[at](part) for at, part in enumerate(torch.split(tokens, counts)) if len(part)
    ]
    weighed = torch.cat(outputs) * top_k_weights.reshape(-1, 1)[order]
    return weighed.index_select(0, torch.argsort(order)).view(*top_k_index.shape, -1).sum(1)


__all__ = ["ExpertBlock", "block_stand_in", "rerouting", "weighted_sum"]
