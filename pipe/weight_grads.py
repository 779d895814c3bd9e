"""Weight gradients of linear layers, computed after the backward that brings the gradients of the inputs.

    I   deferring(key): loss.backward()    dx = dy W   and   (x, dy) is kept under `key`
    W   run(key)                           dW = dy^T x,  db = sum of dy   and   sink(parameter, gradient)

- Zero-bubble schedules fill waiting time with W (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2).
  torch's executor cuts the autograd graph instead. It skips gradient hooks and recomputes a checkpoint again
  for each linear layer.
- Only linear layers are deferred: `nn.Linear` and transformers' `Conv1D`. All other parameters get their
  gradients in I. So does a linear layer in a compiled block, or with a weight that another layer uses.
- Gradients have the bits of autograd: the same products of the same matrices, in the order of arrival.
  Several uses of one weight differ in the last bits in two cases. Under autocast they are summed in the
  weight's dtype; autograd sums in autocast's. Of reentrant checkpoints autograd adds each call to the total.
- W reads no weight, so parameters may be dropped before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..ops.device import autocast_dtype
from ..ops.linear import bias_grad, input_grad, is_by_columns, linear_transposed, weight_grad
from ..ops.torch_internals import in_functorch
from ..utils.errors import UsageError

Sink = Callable[[nn.Parameter, Tensor], None]


class _Entry(NamedTuple):
    """What the weight gradients of one call need. `x`, `dy`: rows of inputs and of output gradients."""

    weight: nn.Parameter | None  # None: frozen
    bias: nn.Parameter | None
    x: Tensor | None  # [..., in_features]
    dy: Tensor  # [..., out_features]
    version: int  # of x: it may not change any more
    is_transposed: bool  # the weight is [in_features, out_features]
    is_by_columns: bool  # x @ matrix reads the weight by columns; it may be dropped before W
    is_flat: bool  # the bias was added to [rows, out_features]


@final
class WeightGrads:
    """Owns what is kept for gradients that are not computed yet, by key."""

    def __init__(self, modules: Iterable[nn.Module], sink: Sink) -> None:
        """Prepare the linear layers in `modules`.

        A layer with a method `slice_product(x, bias)` and a true `has_plain_product` keeps its forward: only
        its product is prepared. Another layer stays as it is if a subclass or the instance has a forward of
        its own, if its weight is computed (weight_norm, parametrizations), or if a module in `modules` that
        is not prepared shares it.

        Args:
            sink: gets a parameter and its gradient [shape of the parameter], in the parameter's dtype. `run`
                calls it once for each parameter. It owns the gradient.
        """
        self._sink = sink
        self._key: Hashable | None = None
        self._kept: dict[Hashable, deque[_Entry]] = {}
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._before: list[tuple[nn.Module, type[nn.Module]]] = []
        for module in _linear_layers(modules):
            base = type(module)
            if base not in self._classes:
                self._classes[base] = _deferrable(base, self)
            self._before.append((module, base))
            module.__class__ = self._classes[base]

    @property
    def num_layers(self) -> int:
        """The linear layers that are prepared."""
        return len(self._before)

    @property
    def keys(self) -> list[Hashable]:
        """The keys under which something is kept, oldest first."""
        return list(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the inputs and output gradients that are kept; what several entries share counts once."""
        entries = [entry for kept in self._kept.values() for entry in kept]
        tensors = [tensor for entry in entries for tensor in (entry.x, entry.dy)]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None
        }
        return sum(storage.nbytes() for storage in storages.values())

    def deferring(self, key: Hashable | None) -> AbstractContextManager[None]:
        """Inside, backward keeps what weight gradients need under `key`. None: it computes them at once."""
        return nullcontext() if key is None and self._key is None else self._deferring(key)

    @contextmanager
    def _deferring(self, key: Hashable | None) -> Iterator[None]:
        before, self._key = self._key, key
        try:
            yield
        finally:
            self._key = before

    def run(self, key: Hashable) -> None:
        """Compute the gradients that were deferred under `key`, in the order of arrival.

        Each entry is freed as soon as it is used. Gradients of one parameter are summed first, as autograd
        sums them. Nothing happens if nothing is kept under `key`.

        Raises:
            UsageError: an input was changed in place since backward. What `key` had left is dropped.
        """
        kept = self._kept.pop(key, deque())
        uses = Counter(id(param) for entry in kept for param in entry[:2] if param is not None)
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            while kept:
                self._compute(kept.popleft(), uses, sums)

    def _compute(self, entry: _Entry, uses: Counter[int], sums: dict[int, Tensor]) -> None:
        if entry.weight is not None:
            self._add(entry.weight, _weight_grad(entry), uses, sums)
        if entry.bias is not None:
            self._add(entry.bias, _bias_grad(entry), uses, sums)

    def _add(
        self, param: nn.Parameter, grad: Tensor, uses: Counter[int], sums: dict[int, Tensor]
    ) -> None:
        """Add to the sum of `param`; hand it over if this is the last use."""
        key, grad = id(param), grad.to(param.dtype)
        if key in sums:
            grad = sums.pop(key).add_(grad)
        uses[key] -= 1
        if uses[key]:
            sums[key] = grad
        else:
            self._sink(param, grad)

    def clear(self) -> None:
        """Drop everything that is kept, after an error."""
        self._kept.clear()

    def restore(self) -> None:
        """Make the layers what they were. What is kept can still be run."""
        for module, base in self._before:
            if type(module) is self._classes[base]:
                module.__class__ = base
        self._before = []

    def keep(self, entry: _Entry) -> bool:
        """Keep `entry` for later. False: its gradients are needed now."""
        if self._key is None or torch.is_grad_enabled():  # a graph of the gradients is wanted
            return False
        self._kept.setdefault(self._key, deque()).append(entry)
        return True


# -- which layers -----------------------------------------------------------------------------------------


def _linear_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers to prepare, each once; not those whose parameters another kind of module uses as well."""
    submodules = dict.fromkeys(module for top in modules for module in top.modules())
    layers = [module for module in submodules if _is_linear(module)]
    others = set(submodules).difference(layers)
    used_otherwise = {id(param) for module in others for param in module._parameters.values()}
    return [
        layer
        for layer in layers
        if not any(id(p) in used_otherwise for p in layer._parameters.values() if p is not None)
    ]


def _is_linear(module: nn.Module) -> bool:
    """`module` computes x W^T + b, or x W + b as transformers' Conv1D, and nothing replaces its forward."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if (
        "forward" in module.__dict__
        or type(weight) is not nn.Parameter
        or not weight.is_floating_point()
    ):
        return False
    if getattr(module, "has_plain_product", False):
        return True
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if type(module).__name__ != "Conv1D" or weight.ndim != 2 or bias is None:
        return False
    return bias.shape == weight.shape[1:] and getattr(module, "nf", 0) == len(bias)


def _deferrable(base: type[nn.Module], owner: WeightGrads) -> type[nn.Module]:
    """A subclass of `base` with the same name, whose weight gradients `owner` may defer."""
    plain: Callable[..., Tensor] = base.forward
    is_transposed = not issubclass(base, nn.Linear)
    has_product = getattr(base, "has_plain_product", False)
    plain_product: Callable[..., Tensor] = getattr(base, "slice_product") if has_product else plain  # noqa: B009

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        params = self._parameters.get("weight"), self._parameters.get("bias")
        if kwargs or len(args) != 1 or not _can_defer(args[0], *params):
            return plain(self, *args, **kwargs)
        return linear(args[0], *params)

    def product(self: nn.Module, x: Tensor, bias: nn.Parameter | None) -> Tensor:
        weight = self._parameters.get("weight")
        if not _can_defer(x, weight, bias):
            return plain_product(self, x, bias)
        return linear(x, weight, bias)

    def linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(x.device.type)
        if dtype is not None and x.dtype is not torch.float64:
            x = x.to(dtype)  # what autocast would save
        result: Tensor = _Linear.apply(x, weight, bias, owner, is_transposed)  # type: ignore[no-untyped-call]
        return result

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, max(int(protocol), 2))
        _, args, *state = reduced
        return (_new, (base, *args[1:]), *state)  # copies and pickles are plain layers

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    methods: dict[str, Any] = {"forward": forward}
    if has_product:
        methods = {"slice_product": product, "defers_weight_grads": True}
    return type(base.__name__, (base,), {**names, **methods, "__reduce_ex__": __reduce_ex__})


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _can_defer(x: Any, weight: Tensor | None, bias: Tensor | None) -> bool:
    """This call may compute its weight gradients later."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return False
    params = [weight] if bias is None else [weight, bias]
    if not any(param.requires_grad for param in params) or any(map(_has_hooks, params)):
        return False
    if not isinstance(x, Tensor) or in_functorch():
        return False
    source = x._base if x._is_view() else x  # parameters may be dropped before W
    return not isinstance(source, nn.Parameter)


def _has_hooks(param: Tensor) -> bool:
    """The script wants to see the gradient in backward."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


# -- the layer under autograd -----------------------------------------------------------------------------


@final
class _Linear(torch.autograd.Function):
    """A linear layer. Backward leaves the gradients of its parameters to the owner, or computes them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        owner: WeightGrads,
        is_transposed: bool,
    ) -> Tensor:
        compute = linear_transposed if is_transposed else nn.functional.linear
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast from here would have no gradient
        try:
            y = compute(x, weight, bias)
        finally:
            torch.set_autocast_cache_enabled(caches)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.params = weight if needs_weight else None, bias if needs_bias else None
        ctx.owner, ctx.is_transposed = owner, is_transposed
        ctx.x_is_by_columns = x.ndim == 2 and is_by_columns(x)
        ctx.weight_is_by_columns = is_by_columns(weight, is_transposed)
        ctx.is_flat = is_transposed or x.is_contiguous()
        return y.detach()  # not a view, which may not be changed in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        dx = None
        if weight is not None:
            weight = weight.to(dy.dtype)
            matrix = weight if ctx.is_transposed else weight.t()
            dx = input_grad(dy, matrix, is_by_columns=ctx.x_is_by_columns)
        entry = _Entry(
            *(ctx.params[0], ctx.params[1], x, dy, 0 if x is None else x._version),
            is_transposed=ctx.is_transposed,
            is_by_columns=ctx.weight_is_by_columns,
            is_flat=ctx.is_flat,
        )
        if ctx.owner.keep(entry):
            return dx, None, None, None, None
        dw = _weight_grad(entry).to(entry.weight.dtype) if entry.weight is not None else None
        db = _bias_grad(entry).to(entry.bias.dtype) if entry.bias is not None else None
        return dx, dw, db, None, None


# -- the products ------------------------------------------------------------------------------------------


def _weight_grad(entry: _Entry) -> Tensor:
    """dW [shape of the weight], in the dtype of dy."""
    x = entry.x
    assert x is not None
    if x._version != entry.version:
        assert entry.weight is not None
        raise UsageError(
            f"the input of a linear layer with a weight of shape {tuple(entry.weight.shape)} was changed in "
            "place between backward and the gradient of that weight, which is computed later: its value is "
            'lost; change a copy, or set pipeline.schedule to "1f1b"'
        )
    return weight_grad(
        x, entry.dy, is_by_columns=entry.is_by_columns, is_transposed=entry.is_transposed
    )


def _bias_grad(entry: _Entry) -> Tensor:
    """db [out_features], in the dtype of dy."""
    return bias_grad(entry.dy, is_flat=entry.is_flat)


__all__ = ["Sink", "WeightGrads"]
