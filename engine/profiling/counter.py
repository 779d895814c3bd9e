"""A dispatch mode that adds up the FLOPs of products, by the formulas of `torch.utils.flop_counter`.

Operations are seen below autograd, as torch runs them: `F.linear` is an addmm, a fused attention is one call.
A backward's operations are seen as well, and those of a forward that backward runs again. torch's own
`FlopCounterMode` does not tell these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from ...ops.torch_internals import HigherOrderOperator, TorchDispatchMode, in_backward

Formula = Callable[..., int]  # of the arguments, and of the result as out_val


@dataclass
class Tally:
    """A sum of FLOPs."""

    flops: int = 0


@final
class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. One at a time; it may be entered any number of times.

    Attributes:
        forward: what calls outside of a backward are added to. The owner changes it at the edges of modules.
        gradients: what autograd computes.
        recomputed: forwards that backward runs again, for activation checkpointing.
        in_backward: what runs outside of autograd's engine belongs to a backward, too.
    """

    supports_higher_order_operators = True

    def __init__(self, forward: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = forward
        self.gradients, self.recomputed = Tally(), Tally()
        self.in_backward = False
        self._known = known_formulas()
        # by the id of the operation, which lives as long as torch does: its own hash is a Python function
        self._formulas: dict[int, Formula | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap each call to keep its compiler out, and the recorder has it switched off."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            formula = self._formulas[id(func)]
        except KeyError:
            formula = self._formulas[id(func)] = self._find(func)
        if formula is _in_parts:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            self._tally().flops += int(formula(*args, **kwargs, out_val=out))
        return out

    def _tally(self) -> Tally:
        if not in_backward():
            return self.gradients if self.in_backward else self.forward
        # autograd computes gradients without grad mode; a checkpoint enables it to run its forward again
        return self.recomputed if torch.is_grad_enabled() else self.gradients

    def _find(self, func: Any) -> Formula | None:
        """The formula of `func`; `_in_parts` where torch composes it of others, as in inference mode."""
        if isinstance(func, HigherOrderOperator):
            return self._known.get(func)
        formula = self._known.get(func._overloadpacket)
        if formula is None and func._can_decompose():
            return _in_parts
        return formula


def _in_parts(*args: Any, **kwargs: Any) -> int:
    return 0


# ---- formulas ---------------------------------------------------------------------------------------


def known_formulas() -> Mapping[Any, Formula]:
    """torch's, those that libraries have registered with it, and those of products that it lacks."""
    from torch.utils.flop_counter import flop_registry  # it is slow to import

    aten = torch.ops.aten
    return {
        **dict.fromkeys((aten.mv, aten.dot, aten.vdot), _vectors),
        aten.addmv: _added_vectors,
        aten.addbmm: _added_products,
        **dict.fromkeys((aten._grouped_mm, aten._scaled_grouped_mm), _grouped),
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.mkldnn_rnn_layer: _recurrent_layer,
        aten.mkldnn_rnn_layer_backward: _recurrent_layer_backward,
        aten._cudnn_rnn: _recurrent,
        aten._cudnn_rnn_backward: _recurrent_backward,
        **flop_registry,
    }


def _vectors(left: Tensor, right: Tensor, **kwargs: Any) -> int:
    return 2 * left.numel()


def _added_vectors(added: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> int:
    return 2 * left.numel()


def _added_products(added: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> int:
    return 2 * prod(left.shape) * right.shape[-1]


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """Rows of `left` (or columns of `right`) that no group has count as well."""
    rows = left.shape[1:] if left.dim() == 3 and right.dim() == 2 else left.shape
    return 2 * prod(rows) * right.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """Scores and their product with the values. Query heads that share a head of keys count each."""
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    """Five products: the scores again, then gradients of scores, query, key and value."""
    widths = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * widths


def _recurrent(x: Tensor, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    """The matrices of recurrent layers, once for each step of each sequence. No gates."""
    return 2 * prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.dim() > 1)


def _recurrent_backward(x: Tensor, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(x, weights)


def _recurrent_layer(x: Tensor, *args: Any, **kwargs: Any) -> int:
    return _recurrent(x, args[:4])


def _recurrent_layer_backward(x: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(x, args[:4])


__all__ = ["Formula", "OperationCounter", "Tally", "known_formulas"]
