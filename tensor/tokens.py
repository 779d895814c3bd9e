"""Blocks whose activations are cut along the sequence between their layers: the word `sequence_parallel`.

             tokens of a rank     all tokens                      tokens of a rank
    x ──cut── norm ──gather── q k v (columns) ── o (rows) ──sum of own tokens── + ──gather after the last block

              forward                              backward
    gather    all ranks' tokens                    sums of own tokens   before layers that are cut by columns
    leave     sums of own tokens                   all ranks' tokens    after a layer that is cut by rows
    cut       own tokens                           all ranks' tokens    before the first block
    join      all ranks' tokens                    own tokens           after the last block

A block sends as many bytes as with whole activations. What lies between its layers needs 1/T of the memory.
Source: Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..ops.comm.handles import Handle, Then
from ..ops.flat import sum_in_order
from ..utils.errors import UsageError

GATHER_KIND = "tensor gathers"
SUM_KIND = "tensor sums"
NAMES = ("hidden_states", "x", "input")


@final
class Tokens:
    """The messages of one tensor group for tensors [B, tokens, ...] that are cut evenly in dimension 1."""

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self.num_ranks = group.world_size

    def gather(self, x: Tensor, what: str) -> Tensor:
        """[B, own tokens, ...] -> [B, all tokens, ...]; backward sums."""
        tokens: Tensor = _Gather.apply(x, self, what)  # type: ignore[no-untyped-call]
        return tokens

    def leave(self, y: Tensor, what: str) -> Tensor:
        """[B, all tokens, ...] -> the sum over ranks of [B, own tokens, ...]; backward gathers."""
        sums: Tensor = _Leave.apply(y, self, what)  # type: ignore[no-untyped-call]
        return sums

    def cut(self, x: Tensor, what: str) -> Tensor:
        """[B, all tokens, ...], equal on all ranks -> [B, own tokens, ...]; backward gathers.

        Raises:
            UsageError: the ranks cannot share the tokens evenly.
        """
        length, count = x.shape[1], self._group.world_size
        if length % count:
            raise UsageError(
                f'tensor_parallel.plan: "sequence_parallel" in {what} with {length} tokens, which {count} '
                f"ranks cannot share evenly; pad the batch to {length + -length % count} tokens"
            )
        own_tokens: Tensor = _Cut.apply(x, self, what)  # type: ignore[no-untyped-call]
        return own_tokens

    def join(self, x: Tensor, what: str) -> Tensor:
        """[B, own tokens, ...] -> [B, all tokens, ...]; backward cuts: the gradient is equal on all ranks."""
        tokens: Tensor = _Join.apply(x, self, what)  # type: ignore[no-untyped-call]
        return tokens

    def gathered(self, x: Tensor, what: str) -> Tensor:
        """All ranks' tokens, without autograd."""
        parts = [x.contiguous()] * self._group.world_size
        outs = [torch.empty_like(part) for part in parts]
        self._group.all_to_all(outs, parts, what=what, kind=GATHER_KIND).wait()
        return torch.cat(outs, 1)

    def summed(self, y: Tensor, what: str) -> Tensor:
        """The sums over ranks of own tokens, in rank order, without autograd."""
        total, handle = self.start_sum(y, what)
        handle.wait()
        return total

    def start_sum(self, y: Tensor, what: str) -> tuple[Tensor, Handle]:
        """As `summed`: the result has its values after a wait for the handle."""
        parts = [part.contiguous() for part in y.chunk(self._group.world_size, 1)]
        outs = [torch.empty_like(part) for part in parts]
        handle = self._group.all_to_all(outs, parts, what=what, kind=SUM_KIND)
        total = torch.empty_like(outs[0])

        def add() -> None:
            sum_in_order(total.view(-1), [out.view(-1) for out in outs], add=False)

        return total, Then(handle, add, parts)

    def of_own(self, whole: Tensor) -> Tensor:
        """Own tokens of a tensor with all of them."""
        return whole.chunk(self._group.world_size, 1)[self._group.rank].contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, what: str) -> Tensor:
        ctx.tokens, ctx.what = tokens, what
        return tokens.gathered(x, f"the input of {what}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tokens.summed(grad, f"the gradient of the input of {ctx.what}"), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tokens, what: str) -> Tensor:
        ctx.tokens, ctx.what = tokens, what
        return tokens.summed(y, f"the output of {what}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        what = f"the gradient of the output of {ctx.what}"
        return ctx.tokens.gathered(grad, what), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, what: str) -> Tensor:
        ctx.tokens, ctx.what = tokens, what
        return tokens.of_own(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        what = f"the gradient of the input of {ctx.what}"
        return ctx.tokens.gathered(grad, what), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tokens, what: str) -> Tensor:
        ctx.tokens = tokens
        return tokens.gathered(x, f"the output of {what}")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tokens.of_own(grad), None, None


def place_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | str:
    """Where the activations [B, tokens, width] are among the arguments of the block `name`.

    Raises:
        UsageError: the first argument is not such a tensor, and none has a name of `NAMES`.
    """
    if args and isinstance(args[0], Tensor) and args[0].dim() == 3:
        return 0
    for key in NAMES:
        if isinstance(kwargs.get(key), Tensor) and kwargs[key].dim() == 3:
            return key
    raise UsageError(
        f'tensor_parallel.plan: "sequence_parallel" in {name}: its first argument is no tensor [samples, '
        "tokens, width], so its tokens cannot be cut; take the word out of the plan"
    )


def with_activations(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the block `name` with its activations changed."""
    place = place_of(name, args, kwargs)
    if isinstance(place, int):
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {place: change(kwargs[place])}


def cut_blocks(blocks: Sequence[tuple[str, nn.Module]], tokens: Tokens) -> list[Any]:
    """Cut the input of the first of consecutive blocks, and join the output of the last. Returns the hooks."""
    first_name, first = blocks[0]
    last_name, last = blocks[-1]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_activations(first_name, args, kwargs, lambda x: tokens.cut(x, first_name))

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (tokens.join(output[0], last_name), *output[1:])
        return tokens.join(output, last_name)

    return [
        first.register_forward_pre_hook(before, with_kwargs=True),
        last.register_forward_hook(after),
    ]


__all__ = ["Tokens", "cut_blocks", "with_activations"]
