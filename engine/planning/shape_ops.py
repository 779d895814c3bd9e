"""Operations on the meta device without torch's compiler, and answers where a model reads a value.

torch computes the shape of some results by Python code that loads its compiler: 2 seconds and 80 MB. The few
such operations of usual layers are computed here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = next((x for x in tensors if x.dim() > 1 or x.numel()), tensors[0])
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors if x.dim() == first.dim())
    return first.new_empty(shape)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[-1]))


def _layer_norm(x: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty((*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)))
    return x.new_empty(x.shape), mean, torch.empty_strided(mean.shape, mean.stride(), device="meta")


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight, bias = (None if one is None else one.new_empty(one.shape) for one in rest[:2])
    return x.new_empty(x.shape), weight, bias


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = query.shape
    output = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    return output, query.new_empty((batch, length, heads), dtype=torch.float32).transpose(1, 2)


def _attention_backward(grad: Tensor, *inputs: Tensor, **_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _mm(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


def _addmm(_: Tensor, x: Tensor, y: Tensor, **__: Any) -> Tensor:
    return _mm(x, y)


def _like(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _softmax(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _softmax_backward(grad: Tensor, _: Tensor, __: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


def _nll_loss(x: Tensor, target: Tensor, _: Any, reduction: int, *__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(() if reduction else target.shape), x.new_empty(())


def _nll_loss_backward(_: Tensor, x: Tensor, *__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _embedding_backward(grad: Tensor, _: Tensor, num_weights: int, *__: Any) -> Tensor:
    return grad.new_empty((num_weights, grad.shape[-1]))


def _slice_backward(grad: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    return grad.new_empty(tuple(sizes))


def _reduced(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """A sum or mean over `dims`."""
    over = {dim % x.dim() for dim in dims} if dims else set(range(x.dim()))
    kept = [1 if at in over else n for at, n in enumerate(x.shape) if keepdim or at not in over]
    return x.new_empty(kept, dtype=dtype)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The shape by broadcasting; the dtype from the same operation on one number of each dtype."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dtype = _dtype_of(func, args, kwargs)
    return tensors[0].new_empty(broadcast([tuple(x.shape) for x in tensors]), dtype=dtype)


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an operation on tensors of these shapes.

    >>> broadcast([(8, 1, 4), (3, 1)])
    (8, 3, 4)
    """
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _dtype_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.ones((1,) * value.dim(), dtype=value.dtype)
        return value

    found: Tensor = func(*map(one, args), **{key: one(value) for key, value in kwargs.items()})
    return found.dtype


@final
class FusedAttention(TorchFunctionMode):
    """Attention keeps what its fused kernels keep. On the meta device torch would keep all weights."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(_sdpa).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        return _sdpa(*given.args, **given.kwargs)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of `scaled_dot_product_attention`."""
    found: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found


@final
class ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, nothing is computed. A model that reads a value gets True: masks are asked if they are full."""

    def __init__(self, *, quick: bool = True) -> None:
        """quick: shapes of usual operations are computed here, otherwise all by torch."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._quick = quick

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler to keep the mode out of what is compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return True
        if self._quick and args and _is_meta(args[0]):
            own = _OWN.get(func)
            if own is not None:
                return own(*args, **(kwargs or {}))
            if torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
                return _pointwise(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_meta(value: Any) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, Tensor) and first.is_meta


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.cat.default: _cat,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.slice_backward.default: _slice_backward,
    _aten.select_backward.default: _slice_backward,
    _aten.sum.dim_IntList: _reduced,
    _aten.mean.dim: _reduced,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}

__all__ = ["FusedAttention", "ShapesOnly", "broadcast"]
