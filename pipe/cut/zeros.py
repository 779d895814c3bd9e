"""What a module of another stage seems to return: zeros of the right structure, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.torch_internals import TreeSpec
from .flows import flatten, unflatten
from .meta_copies import on_meta

_PLAIN = (type(None), bool, int, float, str)


@final
@dataclass(frozen=True)
class _Zeros:
    """A tensor of zeros to make."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True)
class _Input:
    """The argument at this position, returned as it is."""

    position: int


@final
class ZeroOutputs:
    """Finds the outputs of a module from its copy on the meta device, once for each kind of inputs."""

    def __init__(self, outline: nn.Module, is_expanded: bool) -> None:
        """
        Args:
            outline: a copy of the module on the meta device.
            is_expanded: the zeros take no memory, and operations in place on them fail.
        """
        self.outline = outline
        self._is_expanded = is_expanded
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}

    def train(self, is_training: bool) -> None:
        """Set the mode of the module."""
        if self.outline.training != is_training:
            self.outline.train(is_training)

    def cast(self, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        """The module's parameters have been cast: dtype before -> after."""
        for param in self.outline.parameters():
            param.data = param.data.to(dtypes.get(param.dtype, param.dtype))
        self._known.clear()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """The outputs for these arguments. Floating ones require gradients, for reentrant checkpoints."""
        leaves, structure = flatten((args, kwargs))
        key = (self.outline.training, str(structure), tuple(map(_kind, leaves)))
        if key not in self._known:
            self._known[key] = self._find(leaves, structure)
        recipe, outputs = self._known[key]
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        return unflatten([self._make(item, leaves, device) for item in recipe], outputs)

    def _make(self, item: Any, leaves: list[Any], device: torch.device) -> Any:
        if isinstance(item, _Input):
            return leaves[item.position]
        if not isinstance(item, _Zeros):
            return item
        wants_grad = item.dtype.is_floating_point or item.dtype.is_complex
        one = torch.zeros((), dtype=item.dtype, device=device, requires_grad=wants_grad)
        whole = one.expand(item.shape)
        return whole if self._is_expanded else whole.contiguous()

    def _find(self, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        try:
            return self._run_on_meta(leaves, structure)
        except Exception:  # an operation whose output's shape depends on values
            return self._run_on_zeros(leaves, structure)

    def _run_on_meta(self, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        inputs = [on_meta(x) if isinstance(x, Tensor) else _copied(x) for x in leaves]
        args, kwargs = unflatten(inputs, structure)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _recipe(self.outline(*args, **kwargs), inputs)

    def _run_on_zeros(self, leaves: list[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
        """Run a temporary copy with zeros for weights on zeros, so that routing and lengths are possible."""
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        module = deepcopy(self.outline).to_empty(device=device)
        with torch.no_grad(), torch.random.fork_rng():
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.zero_()
            inputs = [torch.zeros_like(x) if isinstance(x, Tensor) else _copied(x) for x in leaves]
            args, kwargs = unflatten(inputs, structure)
            return _recipe(module(*args, **kwargs), inputs)


def _recipe(outputs: Any, inputs: list[Any]) -> tuple[list[Any], TreeSpec]:
    leaves, structure = flatten(outputs)
    positions = {id(x): at for at, x in enumerate(inputs) if not isinstance(x, _PLAIN)}
    recipe: list[Any] = []
    for leaf in leaves:
        if id(leaf) in positions:
            recipe.append(_Input(positions[id(leaf)]))
        elif isinstance(leaf, Tensor):
            recipe.append(_Zeros(tuple(leaf.shape), leaf.dtype))
        else:
            recipe.append(leaf)
    return recipe, structure


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _copied(leaf: Any) -> Any:
    """A copy that the module may change (a cache of keys and values), where it can be copied."""
    if isinstance(leaf, _PLAIN):
        return leaf
    try:
        return deepcopy(leaf)
    except Exception:
        return leaf


__all__ = ["ZeroOutputs"]
