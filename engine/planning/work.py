"""The kernels of a forward and backward: a dispatch mode that sees their shapes, and what each one takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ...ops.comm.fake import Journal
from ...ops.torch_internals import TorchDispatchMode, tree_leaves
from .machine import Dtype, Machine, dtype_name

MATRIX, ATTENTION, ATTENTION_BACKWARD, OTHER = "matrix", "attention", "attention backward", "other"
_aten = torch.ops.aten
# operation -> where the two factors are among its arguments
PRODUCTS = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten._scaled_mm: (0, 1),
}
FREE = frozenset({_aten.detach, _aten._unsafe_view, _aten.lift_fresh, _aten._local_scalar_dense})


class Kernel(NamedTuple):
    """One kernel by what its time depends on.

    kind: see above. name: of torch's operation. dtype: a key of `Machine.matrix`.
    shape: (batch, m, n, k) of a product; (batch x heads, queries, keys, width, is causal) of attention; ().
    size_bytes: that it reads and writes.
    """

    kind: str
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def flops(self) -> int:
        """Of products and attention. A causal attention needs half of its scores, and counts half."""
        if self.kind == MATRIX:
            return 2 * prod(self.shape)
        if self.kind == OTHER:
            return 0
        heads, queries, keys, width, is_causal = self.shape
        factor = 4 if self.kind == ATTENTION else 10
        return factor * heads * queries * keys * width // (1 + is_causal)

    @property
    def model_flops(self) -> int:
        """As FLOP utilisation counts them: also scores that a causal mask drops, and none twice."""
        if self.kind not in (ATTENTION, ATTENTION_BACKWARD):
            return self.flops
        heads, queries, keys, width, _ = self.shape
        return (4 if self.kind == ATTENTION else 8) * heads * queries * keys * width


Kernels = Counter[Kernel]
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]  # function, args, kwargs


@final
class Prices:
    """Seconds of kernels on one machine. What was asked once is kept."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[Kernel, float] = {}

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel on the device alone, without its launch.

        Raises ConfigError: the machine has no rate for its dtype.
        """
        if kernel not in self._known:
            self._known[kernel] = self._seconds(kernel)
        return self._known[kernel]

    def _seconds(self, kernel: Kernel) -> float:
        machine = self.machine
        size_bytes = max(kernel.size_bytes, 1)
        if kernel.kind == OTHER:
            return size_bytes / machine.kernels.get(kernel.name, machine.memory).at(size_bytes)
        if kernel.kind == MATRIX:
            _, m, n, k = kernel.shape
            rate = machine.matrix_table(kernel.dtype).near(m, n, k)
            return max(kernel.flops / rate, size_bytes / machine.memory.at(size_bytes))
        tables = machine.attention
        if kernel.kind == ATTENTION_BACKWARD:
            tables = {**tables, **machine.attention_backward}
        _, queries, keys, width, _ = kernel.shape
        if kernel.dtype in tables:
            return kernel.flops / tables[kernel.dtype].at(width, queries)
        # two products, each as fast as that of one head
        return kernel.flops / machine.matrix_table(kernel.dtype).near(queries, keys, width)


class KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every kernel to a journal, in counters between its other events."""

    def __init__(self, journal: Journal, calls: dict[Kernel, Call] | None = None) -> None:
        """calls: gets for each kernel a call of torch that launches it. Its tensors have no values."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._journal, self._calls = journal, calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, out)
        return out

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """A call of torch has returned `out`."""
        kernel = kernel_of(func, args, kwargs, out)
        if kernel is not None:
            self.add(kernel, (func, args, kwargs))

    def add(self, kernel: Kernel, call: Call) -> None:
        """A call has launched a kernel."""
        self.kernels()[kernel] += 1
        if self._calls is not None:
            self._calls.setdefault(kernel, call)

    def kernels(self) -> Kernels:
        """The counter at the end of the journal."""
        events = self._journal.events
        if not (events and isinstance(events[-1], Counter)):
            events.append(Counter())
        found = events[-1]
        assert isinstance(found, Counter)
        return found


def payload(tensor: Tensor) -> Tensor:
    """The elements of a tensor: those of torchao in 8 bits say that they have the dtype of before."""
    found: Tensor = getattr(tensor, "_data", tensor)
    return found


def kernel_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Kernel | None:
    """The kernel that a call of torch launches; None: it only changes a view, or reads a value."""
    packet = func._overloadpacket
    if packet in FREE or func.is_view:
        return None
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if not made and not (given and func._schema.is_mutable):
        return None
    size_bytes = sum(tensor.numel() * payload(tensor).itemsize for tensor in [*given, *made])
    name = packet.__name__
    if not size_bytes or name.startswith(("empty", "new_empty")):
        return None
    dtype = dtype_name((made or given)[0].dtype)
    if packet in PRODUCTS:
        left, right = (args[place] for place in PRODUCTS[packet])
        dtype = dtype_name(payload(left).dtype)
        batch = prod(left.shape[:-2])
        sizes = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
        return Kernel(MATRIX, name, dtype, sizes, size_bytes)
    if "scaled_dot_product" in name and "attention" in name:
        is_backward = "backward" in name
        query, key = (args[1], args[2]) if is_backward else (args[0], args[1])
        flags = [arg for arg in args if isinstance(arg, bool)]
        heads = prod(query.shape[:-2])
        shape = (heads, query.shape[-2], key.shape[-2], query.shape[-1], int(any(flags[:1])))
        kind = ATTENTION_BACKWARD if is_backward else ATTENTION
        return Kernel(kind, name, dtype_name(query.dtype), shape, size_bytes)
    return Kernel(OTHER, name, dtype, (), size_bytes)


__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "MATRIX",
    "OTHER",
    "Kernel",
    "KernelWatch",
    "Kernels",
    "Prices",
    "kernel_of",
    "payload",
]
