"""Which of the inputs of a forward are the tokens and the positions of packed rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ...tensor.sequence.plain_batches import LABELS, POSITIONS
from ..data.batches import replaced
from ..data.packing import IGNORED

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
MASK, STARTS = "attention_mask", "cu_seqlens"


@final
class Names:
    """The names of the arguments of a model's forward."""

    def __init__(self, model: nn.Module) -> None:
        self._signature = inspect.signature(model.forward)

    def takes(self, name: str) -> bool:
        """The forward can be called with this argument."""
        params = self._signature.parameters
        return name in params or any(param.kind is param.VAR_KEYWORD for param in params.values())

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. Those that the forward does not take are left out: it raises then."""
        try:
            bound = self._signature.bind_partial(*args).arguments
        except TypeError:
            bound = {}
        return {**bound, **kwargs}


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a batch, each with the key or the argument that it has."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(name, item)
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from tensors_of(key, getattr(value, key, None))


@final
@dataclass(eq=False)
class PackedInputs:
    """The inputs of one forward, of B rows with N tokens.

    ids: [B, N]. positions: [B, N], also where the model does not get them. others: what else the model gets.
    """

    inputs: Inputs
    ids: Tensor
    positions: Tensor
    gets_positions: bool
    others: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def has_named_positions(self) -> bool:
        """The model gets positions as an argument with a name."""
        return any(value is self.positions for value in self.inputs[1].values())

    def is_plain(self, columns: Sequence[str]) -> bool:
        """Rows of other lengths can be made of these: it is known what each tensor means.

        columns: of the samples, with one value for each token.
        """
        return self.gets_positions and all(
            self._is_known(name, tensor, columns)
            for name, tensors in self.others.items()
            for tensor in tensors
        )

    def _is_known(self, name: str, tensor: Tensor, columns: Sequence[str]) -> bool:
        if name == STARTS and tensor.dim() == 1:
            return True
        if tensor.dim() == 0:
            return True
        if tensor.shape[:2] != self.ids.shape:
            return False
        if name == MASK:
            return tensor.dim() == 2 and bool((tensor == 1).any()) and bool((tensor <= 1).all())
        return name in LABELS or name in columns

    def with_ids(self, ids: Tensor) -> Inputs:
        """The same inputs with other tokens."""
        return self._with({id(self.ids): ids})

    def short(self, positions: Tensor, ids: Tensor) -> Inputs:
        """Inputs for so many tokens. positions, ids: [B, n].

        Values of other columns are some of their own, chosen by token and position.
        """
        length = positions.shape[1]
        new = {id(self.positions): positions, id(self.ids): ids}
        for name, tensors in self.others.items():
            for tensor in tensors:
                if name == STARTS and tensor.dim() == 1:
                    new[id(tensor)] = _starts(positions).to(tensor)
                elif tensor.dim() == 0:
                    continue
                elif name == MASK:
                    new[id(tensor)] = torch.ones_like(tensor[:, :length])
                elif name in LABELS and tensor.shape == self.ids.shape:
                    new[id(tensor)] = torch.where(positions == 0, IGNORED, ids).to(tensor.dtype)
                else:
                    values = tensor.flatten(0, 1)
                    new[id(tensor)] = values[(7919 * ids.long() + 31 * positions) % len(values)]
        return self._with(new)

    def without_positions(self, positions: Tensor, ids: Tensor) -> Inputs:
        """`short` for one sample a row, whose positions the model makes itself."""
        args, kwargs = self.short(positions, ids)
        return args, {key: value for key, value in kwargs.items() if value is not positions}

    def _with(self, new: Mapping[int, Tensor]) -> Inputs:
        args, kwargs = replaced(
            self.inputs, lambda tensor: new.get(id(tensor), tensor), lambda other: other
        )
        return args, kwargs


def _starts(positions: Tensor) -> Tensor:
    starts = (positions.reshape(-1) == 0).nonzero().view(-1)
    return torch.cat([starts, starts.new_full((1,), positions.numel())])


def find_packed(
    names: Names, inputs: Inputs, recent: Sequence[tuple[Tensor, Tensor]], column: str
) -> PackedInputs | None:
    """Tokens and positions by their values, else by their names; None: these inputs are no packed rows.

    recent: tokens and positions of the last micro-batches of the loader. column: the name of the tokens.
    """
    args, kwargs = inputs
    named = list(tensors_of("", names.named(args, kwargs)))
    if not any(name for name, _ in named):
        named = list(tensors_of("", (args, kwargs)))
    rows = [(name, t) for name, t in named if t.dim() == 2 and not t.is_floating_point()]
    ids, positions, gets_positions = None, None, False
    for known_ids, known_positions in reversed(recent):
        ids = next((t for _, t in rows if _begins(known_ids, t)), None)
        if ids is not None:
            given = [t for _, t in rows if _begins(known_positions, t)]
            gets_positions = bool(given)
            length = ids.shape[1]
            positions = given[0] if given else known_positions[:, :length].to(ids.device)
            break
    if ids is None:
        ids = next((t for name, t in rows if name == column), None)
        positions = next((t for name, t in rows if name in POSITIONS), None)
        gets_positions = positions is not None
    if ids is None or positions is None or positions.shape != ids.shape:
        return None
    found = PackedInputs(inputs, ids, positions, gets_positions)
    for name, tensor in named:
        if tensor is not ids and tensor is not positions:
            found.others.setdefault(name, []).append(tensor)
    return found


def _begins(known: Tensor, given: Tensor) -> bool:
    """`given` has the values of `known`, possibly of fewer tokens."""
    length = given.shape[1]
    return (
        given.shape[0] == known.shape[0]
        and 1 < length <= known.shape[1]
        and torch.equal(given.to(known.device, known.dtype), known[:, :length])
    )


__all__ = ["Inputs", "PackedInputs", "Names", "find_packed"]
