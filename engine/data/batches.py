"""Moves batches to the device, calls the module with them, and takes the loss from its output."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...ops.device import accelerator_of, device_of
from ...ops.torch_internals import tree_leaves, tree_map
from ...utils.errors import UsageError

# -- the way of a batch to the device: pinned by the loader, copied on a stream of its own ---------------
#     host      batch n+1 is read and pinned, its copy is started     no wait for the device
#     copies          [copy n+1]                                      waits for nothing
#     compute   [step n ..........][step n+1 ...]                     step n+1 waits for copy n+1
#
# A copy on the stream of the computation would begin when step n ends.

# on a tensor that a loader of xds has pinned: no stream writes to it, so its copy need not wait for any
_MARK = "_pinned_by_xds"


def pinned(batch: Any) -> Any:
    """`batch` with its tensors of the host in pinned memory; tensors on a device stay.

    Other objects are pinned if they have a method `pin_memory`, as in torch's DataLoader.
    """

    def one(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
            return tensor
        return _marked(tensor.pin_memory())

    def other(value: Any) -> Any:
        pins = getattr(value, "pin_memory", None)
        return pins() if callable(pins) else value

    return replaced(batch, one, other)


def pinned_by_torch(batch: Any) -> Any:
    """`batch` from worker processes, which a thread of torch's DataLoader has pinned."""
    return replaced(batch, lambda tensor: _marked(tensor) if tensor.is_pinned() else tensor, _same)


def not_pinned(batch: Any) -> Any:
    """`batch` as it is, where there is no GPU."""
    return batch


def _marked(tensor: Tensor) -> Tensor:
    setattr(tensor, _MARK, True)
    return tensor


def _same(value: Any) -> Any:
    return value


class BatchCopier(ABC):
    """Copies batches to one device."""

    @abstractmethod
    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        """Copies of those tensors in `batch` that need not wait for the computation, by id."""


@final
class SameStream(BatchCopier):
    """Nothing is copied ahead: the device is the host, or has no streams."""

    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        return {}


@final
class SideStream(BatchCopier):
    """Copies to a GPU on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def copies_of(self, batch: Any) -> Mapping[int, Tensor]:
        found: dict[int, Tensor] = {}

        def collect(tensor: Tensor) -> Tensor:
            if hasattr(tensor, _MARK):
                found[id(tensor)] = tensor
            return tensor

        replaced(batch, collect, _same)
        if not found:
            return found
        with self._stream:
            copies = {
                key: tensor.to(self._device, non_blocking=True) for key, tensor in found.items()
            }
        computation = accelerator_of(self._device).current_stream()
        computation.wait_stream(self._stream)
        for copied in copies.values():
            copied.record_stream(computation)  # its memory belongs to the other stream
        return copies


@cache
def copier_for(device: torch.device) -> BatchCopier:
    """The one copier of this process to `device`."""
    return SideStream(device) if device_of(device).has_streams else SameStream()


# -- the tensors in a batch: in dicts, lists, tuples, other mappings, dataclasses, in any nesting --------


def replaced(
    batch: Any, one: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None
) -> Any:
    """`batch` with `one(tensor)` for each tensor in it, in containers of the same types.

    other: for what is neither a tensor nor a container. Without it, mappings that are no dict (as a tokenizer
        returns them), dataclasses and PackedSequences stay as they are.
    An object of the script is never changed: a copy has the new tensors, if any tensor is another one.
    """

    # functions that call each other would hold the tensors until Python looks for cycles
    return tree_map(partial(_leaf, one, other), batch, is_leaf=_is_packed)


def _leaf(one: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None, value: Any) -> Any:
    if isinstance(value, Tensor):
        return one(value)
    if other is None:
        return value
    if isinstance(value, Mapping):
        return _mapping(value, {key: replaced(item, one, other) for key, item in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return _dataclass(
            value, {name: replaced(getattr(value, name), one, other) for name in names}
        )
    return other(value)


def _is_packed(value: Any) -> bool:
    """Its fields are not independent: batch_sizes has to stay on the host."""
    return isinstance(value, PackedSequence)


def _is_same(old: Any, new: Any) -> bool:
    """Both hold the same objects, perhaps in other lists and dicts."""
    pairs = zip(tree_leaves(old), tree_leaves(new), strict=True)
    return all(before is after for before, after in pairs)


def _mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(_is_same(old[key], item) for key, item in items.items()):
        return old
    if not isinstance(old, MutableMapping):
        return items
    new = copy.copy(old)
    new.update(items)
    return new


def _dataclass(old: Any, values: dict[str, Any]) -> Any:
    changed = {
        name: value for name, value in values.items() if not _is_same(getattr(old, name), value)
    }
    if not changed:
        return old
    new = copy.copy(old)
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # a frozen one refuses setattr
    return new


def move(batch: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Move every tensor in `batch` to `device`; cast fp32 tensors to `float_dtype`, if given.

    Scalars are not cast: they are counts or weights, which 16 bits would round, and a scalar never decides
    the dtype of a result. Tensors that xds's loaders have pinned are copied beside the computation.
    """
    copies = copier_for(device).copies_of(batch)

    def one(tensor: Tensor) -> Tensor:
        casts = tensor.dtype == torch.float32 and tensor.dim() > 0
        arrived = copies.get(id(tensor), tensor)
        return arrived.to(device=device, dtype=float_dtype if casts else None, non_blocking=True)

    def other(value: Any) -> Any:
        return value.to(device) if _moves_itself(value) else value

    # what goes into a module in 16 bits may be an object that the module writes to: it stays the same one
    return replaced(batch, one, other) if float_dtype is None else replaced(batch, one)


def _moves_itself(value: Any) -> bool:
    is_movable = callable(getattr(value, "to", None))
    return is_movable and not isinstance(value, nn.Module | type)


def as_inputs(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional arguments and those by name that `call_with` calls a function with."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def as_batch(like: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The opposite: a batch of the kind of `like`."""
    if isinstance(like, Mapping):
        return dict(kwargs)
    return args if isinstance(like, tuple | list) else args[0]


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call `function` with a mapping as keyword arguments, a tuple or list as positional ones."""
    args, kwargs = as_inputs(batch)
    return function(*args, **kwargs)


def loss_of(output: Any) -> Tensor:
    """The loss in a module's output: the output itself, its `loss`, or the first element of a tuple.

    Raises:
        UsageError: the output has no loss.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list):
        loss = output[0] if output else None
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"the module returned {type(output).__name__} without a loss: train_batch and eval_batch need the "
            "loss itself, a tuple that starts with it, or an object with .loss"
        )
    return loss


def check_loss(loss: object) -> None:
    """Raises UsageError unless `loss` is a scalar that backward can start from."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"backward({type(loss).__name__}): needs the loss, a scalar tensor; if the model returns an "
            "output object, pass its .loss"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"backward() got a loss of shape {tuple(loss.shape)}: the loss must be a scalar tensor; reduce it "
            "with .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "backward() got a loss without a graph: compute it from the engine's output with gradients enabled"
        )
