"""Random-LTD: chosen layers compute a random part of the tokens of each sample, and the others pass by.

    y[kept] = f(x[kept]),  y[others] = x[others]

Source: Yao et al., Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
Transformers, 2022, https://arxiv.org/abs/2211.11586. Kept tokens stay in their order, and their masks,
positions and position embeddings go with them. DeepSpeed cuts the masks of decoders instead, which is right
for causal masks alone, and leaves positions as they are.

Where all tokens are kept the layer is called as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ...ops.torch_internals import tree_leaves
from ...utils.errors import UsageError
from ..data.schedules import TokensKept
from ..model.caches import is_cache, without_caches
from ..model.forwards import Forward, replace_calls
from .arguments import HIDDEN, KEY, Kept, hidden_of, names_of
from .choices import TOKENS, subset, uniform
from .config import RandomLtd

MOST_NAMES = 6  # in one message


@final
class TokenDropping:
    """Drops tokens in layers of one model, from `convert` to `restore`."""

    def __init__(self, section: RandomLtd, seed: int, *, data_rank: int, data_ranks: int) -> None:
        """data_rank: which samples of a micro-batch this rank has; ranks that share samples have one."""
        self.section = section
        self.schedule: TokensKept = section.schedule()
        self.step = -1  # the last one of which a forward has begun
        self._seed, self._data_rank, self._data_ranks = seed, data_rank, data_ranks
        self._micro_batch = 0
        self._num_kept = section.random_ltd_schedule["max_value"]
        self._layers: dict[nn.Module, tuple[str, int]] = {}  # its name, and its number
        self._undo: Callable[[], None] | None = None

    @property
    def layers(self) -> dict[nn.Module, str]:
        """Those that drop tokens, with their names."""
        return {module: name for module, (name, _) in self._layers.items()}

    @property
    def num_kept(self) -> int:
        """The tokens that a layer keeps now."""
        return int(self._num_kept)

    @property
    def is_converted(self) -> bool:
        """Layers drop tokens."""
        return self._undo is not None

    def convert(self, layers: Sequence[tuple[str, nn.Module]], *, is_whole: bool) -> None:
        """Let those of `layers` drop tokens that the config names.

        Args:
            layers: all layers that may be meant, by name; their numbers are the last numbers in the names.
            is_whole: they are the layers of the whole model, not of a pipeline stage.

        Raises:
            UsageError: a number of the config matches no layer, or several.
        """
        self.restore()
        chosen = find_layers(layers, self.section.random_ltd_layer_id, is_whole=is_whole)
        self._layers = {module: (name, number) for number, name, module in chosen}
        self._undo = replace_calls(self._layers, self._around)

    def restore(self) -> None:
        """Layers compute all tokens again."""
        if self._undo is not None:
            self._undo()
        self._undo, self._layers = None, {}

    def enter(self, step: int, micro_batch: int) -> None:
        """Choose for the forwards that follow."""
        self.step, self._micro_batch = step, micro_batch
        self._num_kept = self.schedule.at(step)

    def _around(self, call: Forward) -> Forward:
        @functools.wraps(call)
        def wrapped(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not layer.training or layer not in self._layers:  # or it is a copy of one
                return call(layer, *args, **kwargs)
            hidden = self._hidden(layer, args, kwargs)
            token_dim = int(self.section.hidden_state_order == "batch_seq_dim")
            if self._num_kept >= hidden.shape[token_dim]:
                return call(layer, *args, **kwargs)
            kept = self._kept(layer, hidden)
            given, named = without_caches(args, kwargs)
            given, named = self._parts(kept, layer, hidden, given, named)
            return self._whole(kept, layer, hidden, call(layer, *given, **named))

        return wrapped

    def _hidden(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found = None if args and isinstance(args[0], tuple | list) else hidden_of(args, kwargs)
        if found is None or found.dim() < 2:
            what = "no tensor" if found is None else f"a tensor {list(found.shape)}"
            raise UsageError(
                f"{KEY}: {self._layers[layer][0]} gets {what}, and a layer that drops tokens must get hidden "
                "states [samples, tokens, ...] first; take it out of random_ltd_layer_id"
            )
        return found

    def _kept(self, layer: nn.Module, hidden: Tensor) -> Kept:
        name, number = self._layers[layer]
        batch_first = self.section.hidden_state_order == "batch_seq_dim"
        samples, length = hidden.shape[:2] if batch_first else (hidden.shape[1], hidden.shape[0])
        at = self._micro_batch * self._data_ranks + self._data_rank
        scores = uniform(TOKENS, self._seed, self.step, at, number, samples * length)
        rows = subset(scores.reshape(samples, length), self._num_kept)
        found = torch.from_numpy(rows).to(hidden.device, non_blocking=True)
        return Kept(found, length, batch_first, f"{name} ({type(layer).__name__})")

    def _parts(
        self,
        kept: Kept,
        layer: nn.Module,
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the kept tokens."""

        def part(name: str, value: Any) -> Any:
            if value is hidden:
                return kept.gather(hidden)
            if is_cache(value):
                return value
            return kept.part_of(name, value, is_mask=name == self.section.model_mask_name)

        given = [part(name, value) for name, value in zip(names_of(layer, args), args, strict=True)]
        return tuple(given), {name: part(name, value) for name, value in kwargs.items()}

    def _whole(self, kept: Kept, layer: nn.Module, hidden: Tensor, result: Any) -> Any:
        """The result for all tokens."""
        if isinstance(result, Tensor):
            return kept.scatter(hidden, result)
        if isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
            if not any(isinstance(one, Tensor) for one in tree_leaves(list(result[1:]))):
                items = [kept.scatter(hidden, result[0]), *result[1:]]
                if isinstance(result, list):
                    return items
                return type(result)(*items) if hasattr(result, "_fields") else tuple(items)
        raise UsageError(
            f"{KEY}: {kept.layer} returns {_described(result)}, and a layer that drops tokens must return its "
            f"{HIDDEN} alone, or a tuple that begins with them and has no other tensors, such as attention "
            "weights; take it out of random_ltd_layer_id"
        )


def _described(result: Any) -> str:
    if isinstance(result, tuple | list):
        return "tensors beside its hidden states"
    return type(result).__name__


def find_layers(
    layers: Sequence[tuple[str, nn.Module]], numbers: Sequence[int], *, is_whole: bool
) -> list[tuple[int, str, nn.Module]]:
    """(number, name, module) of each layer in `numbers`.

    The number of a layer is the last number in its name: 3 for "encoder.layers.3.mlp". Where no name has one it
    is the place in `layers`. DeepSpeed looks for the digits anywhere in the name, so that 1 finds layer 10.

    Raises:
        UsageError: a number matches no layer of the whole model, or several layers.
    """
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for place, (name, module) in enumerate(layers):
        digits = [part for part in name.split(".") if part.isdecimal()]
        found.setdefault(int(digits[-1]) if digits else place, []).append((name, module))
    absent = [number for number in numbers if number not in found]
    if absent and is_whole:
        names = [name for name, _ in layers]
        shown = ", ".join([*names[:MOST_NAMES], *(["..."] if names[MOST_NAMES:] else [])])
        raise UsageError(
            f"{KEY}.random_ltd_layer_id: {', '.join(map(str, absent))} match no layer of the model; its layers "
            f"are {shown or 'none'}. Correct the numbers, or pass the layers' class to convert_to_random_ltd"
        )
    for number in numbers:
        names = [name for name, _ in found.get(number, ())]
        if names[1:]:
            raise UsageError(
                f"{KEY}.random_ltd_layer_id: {number} matches {' and '.join(names[:MOST_NAMES])}; pass a class "
                "that only one list of layers has to convert_to_random_ltd"
            )
    return [(number, *found[number][0]) for number in numbers if number in found]


__all__ = ["TokenDropping", "find_layers"]
