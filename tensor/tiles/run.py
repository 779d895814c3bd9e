"""Runs a function tile by tile: forward keeps no activations, and backward computes them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...ops.torch_internals import TreeSpec, outside_of_graphs, tree_flatten, tree_unflatten
from ...utils.arguments import items, wrong
from ...utils.errors import UsageError
from ...utils.module_buffers import Buffers, modules_of, untouched_buffers
from ...utils.replaying import replaying
from .ranges import tile_ranges
from .replay import ReplayState
from .sums import GradSum, Joined
from .weights import leaves_of, trained, weights_of, without_hooks


@outside_of_graphs  # as torch.compiler.disable, which would import torch._dynamo at once: a second
def run_in_tiles(
    function: Callable[..., Any],
    sequences: Sequence[Tensor | None],
    *,
    tiles: int,
    others: Sequence[Any] = (),
    dim: int = 1,
    output_dim: int | None = None,
    weights: Iterable[Tensor] | None = None,
) -> Any:
    """`function(*sequences, *others)`, computed for one tile of the sequence at a time.

    The activations of one tile exist at a time, in forward and in backward. Backward runs the function a
    second time, with the same random numbers and autocast. Each weight gets one gradient per backward: the sum
    over tiles. It is summed in the weight's dtype, or in fp32 where that has 16 bits.

    A token's output must depend on no other token, as that of an MLP or a norm. The method is that of Bekman
    et al., Arctic Long Sequence Training (arXiv 2506.13996), where gradients are added to `.grad` tile by tile.

    Args:
        function: a module, a method of one, or a plain function. It returns tensors in any nesting of tuples,
            lists and dicts.
        sequences: tensors with the same number of tokens in dimension `dim`. None is passed on.
        tiles: how many tiles, cut as by `torch.chunk`: the last one may be shorter. At stage 3 it must be
            equal on all ranks where the function calls a whole unit.
        others: further arguments, the same for each tile. Tensors in them get gradients too.
        dim: the dimension of the tokens in `sequences`.
        output_dim: the dimension in which outputs are joined; `dim` by default.
        weights: the leaf tensors that the function uses and that need a gradient. By default parameters of the
            function's module. For other functions they are found by one more run of the first tile.

    Returns:
        What the function returns for the whole sequence.

    Raises:
        UsageError: sequences of different lengths, no sequence, or `tiles` below 1. In backward: the function
            used a tensor that is not among `weights`.
    """
    sequences = _tensors("sequences", sequences)
    ranges = tile_ranges(_length(sequences, dim), tiles)
    flat, spec = tree_flatten(items("run_in_tiles: others", others, "a list of further arguments"))
    call = _Call(
        function, sequences, ranges, spec, (dim, dim if output_dim is None else output_dim)
    )
    given = weights_of(function) if weights is None else _tensors("weights", weights)
    if given is None:
        given = call.find_weights(sequences, flat) if torch.is_grad_enabled() else []
    inputs = [*sequences, *flat]
    held = {id(value) for value in inputs}
    call.weights = [weight for weight in trained(given) if id(weight) not in held]
    outputs = _Tiled.apply(call, *inputs, *call.weights)  # type: ignore[no-untyped-call]
    assert call.output is not None
    return tree_unflatten(list(outputs), call.output)


def _tensors(argument: str, values: Any) -> list[Any]:
    tensors = items(f"run_in_tiles: {argument}", values, "a list of tensors")
    for value in tensors:
        if not (value is None or isinstance(value, Tensor)):
            raise wrong(f"run_in_tiles: one of {argument}", value, "a tensor")
    return tensors


def _length(sequences: Sequence[Tensor | None], dim: int) -> int:
    lengths = {tensor.shape[dim] for tensor in sequences if tensor is not None}
    if len(lengths) == 1:
        return lengths.pop()
    shapes = [tuple(tensor.shape) for tensor in sequences if tensor is not None]
    raise UsageError(
        f"sequences of the shapes {shapes}: tiles need one number of tokens in dimension {dim}; pass tensors "
        "without that dimension as others"
    )


@final
class _Call:
    """One call of `run_in_tiles`: the function, its tiles and its weights."""

    def __init__(
        self,
        function: Callable[..., Any],
        sequences: Sequence[Tensor | None],
        ranges: Sequence[tuple[int, int]],
        spec: TreeSpec,
        dims: tuple[int, int],
    ) -> None:
        self.ranges, self.num_sequences = ranges, len(sequences)
        self.weights: list[Tensor] = []
        self.output: TreeSpec | None = None  # the form of the function's output
        self.buffers = Buffers(modules_of(function), copies=False)
        self._function, self._spec = function, spec
        self._dim, self.output_dim = dims

    def tile_of(self, value: Any, start: int, size: int) -> Any:
        """Tokens [start, start + size) of a sequence."""
        return None if value is None else value.narrow(self._dim, start, size)

    def run(self, tile: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The leaves of the output for one tile."""
        tile = [value if value is None else value.contiguous() for value in tile]  # for x.view
        output = self._function(*tile, *tree_unflatten(list(others), self._spec))
        leaves, self.output = tree_flatten(output)
        return leaves

    def find_weights(self, sequences: Sequence[Any], others: Sequence[Any]) -> list[Tensor]:
        """The leaf tensors that the first tile brings gradients to. Random numbers are as before."""
        around = ReplayState([*sequences, *others])
        tile = [_alone(self.tile_of(value, *self.ranges[0])) for value in sequences]
        with around.again(), untouched_buffers(modules_of(self._function)):
            return leaves_of(self.run(tile, [_alone(value) for value in others]))


def _alone(value: Any, needs_grad: bool = False) -> Any:
    """A tensor without its graph; other values as they are."""
    return value.detach().requires_grad_(needs_grad) if isinstance(value, Tensor) else value


class _Tiled(torch.autograd.Function):
    """The inputs are the call, its sequences, the leaves of its other arguments, and its weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.around = call, ReplayState(inputs)
        given = inputs[: len(inputs) - len(call.weights)]
        # parameters of stage 3 change their storage until backward: they are read again then
        is_saved = [isinstance(v, Tensor) and not isinstance(v, nn.Parameter) for v in given]
        ctx.save_for_backward(*(v for v, saved in zip(given, is_saved, strict=True) if saved))
        ctx.held = [None if saved else v for v, saved in zip(given, is_saved, strict=True)]
        ctx.is_saved = is_saved
        sequences, others = given[: call.num_sequences], given[call.num_sequences :]
        joined: list[Joined] = []
        first: list[Any] = []
        before = call.buffers.before()
        with ctx.around.autocast():
            for start, size in call.ranges:
                leaves = call.run([call.tile_of(v, start, size) for v in sequences], others)
                if not joined:
                    first = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                    joined = [Joined(call.output_dim, call.ranges) for _ in leaves]
                for into, leaf in zip(joined, leaves, strict=True):
                    if isinstance(leaf, Tensor):
                        into.add(leaf)
                del leaves  # before the next tile is computed
        call.buffers.after(before)
        pairs = zip(joined, first, strict=True)
        outputs = tuple(value if into.whole is None else into.whole for into, value in pairs)
        integers = [o for o in outputs if isinstance(o, Tensor) and not _has_gradient(o)]
        ctx.mark_non_differentiable(*integers)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        saved = iter(ctx.saved_tensors)
        flags = zip(ctx.held, ctx.is_saved, strict=True)
        given = [next(saved) if is_saved else value for value, is_saved in flags]
        replay = _Replay(call, given, ctx.needs_input_grad[1:])
        with (
            ctx.around.again(),
            call.buffers.again({}),
            without_hooks(call.weights),
            replaying(),
            torch.enable_grad(),
        ):
            for start, size in call.ranges:
                replay.tile(start, size, grads)
        return (None, *replay.gradients())


@final
class _Replay:
    """Runs tiles again in backward and sums what they give."""

    def __init__(self, call: _Call, given: Sequence[Any], needs: Sequence[bool]) -> None:
        """
        Args:
            given: the sequences and the leaves of the other arguments.
            needs: whether each of them, and each weight, needs a gradient.
        """
        self._call, self._needs = call, needs
        self._sequences = given[: call.num_sequences]
        self._others = [
            _alone(value, need)
            for value, need in zip(
                given[call.num_sequences :], needs[call.num_sequences : len(given)], strict=True
            )
        ]
        self._rows: list[Tensor | None] = [None] * call.num_sequences  # gradients of the sequences
        self._sums = [GradSum() for _ in needs[call.num_sequences :]]
        self._offsets: dict[int, int] = {}  # of each output: where its next tile begins
        self._is_checked = False

    def tile(self, start: int, size: int, grads: Sequence[Tensor | None]) -> None:
        """Run tokens [start, start + size) forward and backward; `grads` are those of the whole outputs."""
        call, needs = self._call, self._needs
        tile = [
            _alone(call.tile_of(value, start, size), need)
            for value, need in zip(self._sequences, needs, strict=False)
        ]
        leaves = call.run(tile, self._others)
        targets = [*tile, *self._others, *call.weights]
        if not self._is_checked:
            self._check(leaves, targets)
        outputs, parts = self._parts(leaves, grads)
        wanted = [number for number, need in enumerate(needs) if need]
        if not outputs or not wanted:
            return
        tile_grads = torch.autograd.grad(
            outputs, [targets[number] for number in wanted], parts, allow_unused=True
        )
        for number, grad in zip(wanted, tile_grads, strict=True):
            if number >= call.num_sequences:
                self._sums[number - call.num_sequences].add(grad)
            elif grad is not None:
                if (rows := self._rows[number]) is None:
                    rows = self._rows[number] = torch.zeros_like(self._sequences[number])
                call.tile_of(rows, start, size).copy_(grad)

    def _parts(
        self, leaves: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a tile that have a gradient, and their gradients."""
        outputs, parts = [], []
        dim = self._call.output_dim
        for number, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
            if isinstance(leaf, Tensor) and grad is not None and leaf.requires_grad:
                offset = self._offsets.get(number, 0)
                self._offsets[number] = offset + leaf.shape[dim]
                outputs.append(leaf)
                parts.append(grad.narrow(dim, offset, leaf.shape[dim]))
        return outputs, parts

    def _check(self, leaves: Sequence[Any], targets: Sequence[Any]) -> None:
        """Raise if a tensor would lose its gradient."""
        self._is_checked = True
        known = {id(target) for target in targets}
        lost = [tuple(leaf.shape) for leaf in leaves_of(leaves) if id(leaf) not in known]
        if lost:
            raise UsageError(
                f"a function that runs in tiles used a tensor of shape {lost[0]} that needs a gradient and is "
                "not among its weights; add it to `weights`, or pass it as an argument"
            )

    def gradients(self) -> list[Tensor | None]:
        """One gradient for each sequence, other argument and weight; None where there is none."""
        return [*self._rows, *(added.total() for added in self._sums)]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


__all__ = ["run_in_tiles"]
