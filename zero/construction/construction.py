"""Builds a model that is too large for one rank: only one module's own parameters are full at a time.

    registered ──> full ──next module registers──> slice ──an op uses it──> full ──> ... ──exit──> slice

- Torch's registration hooks report new parameters, and a `TorchFunctionMode` reports their uses. Both end
  with the context, and nothing is patched.
- The constructors run unchanged on every rank and draw the same random numbers as without the context.
  Values are bit-equal to plain construction (to rank 0's, if the ranks' seeds differ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...ops.boxes import taken
from ...utils.errors import UsageError
from ..core.owners import clear_pending_owner, find_owner, set_pending_owner
from ..features.external_params import touched_params
from ..layout.slices import Slices
from .slices import SliceStore


@final
class Construction(TorchFunctionMode):
    """A context that builds modules into `store`. All ranks enter it and run the same code."""

    def __init__(self, store: SliceStore) -> None:
        super().__init__()
        self._store = store
        # what is full: id of a module -> its parameters, by id
        self._whole: dict[int, dict[int, nn.Parameter]] = {}
        self._module_ids: dict[int, int] = {}  # id of a parameter -> id of the module that holds it
        self._kept_alive: list[nn.Parameter] = []  # so that their ids are not reused
        self._hooks: list[RemovableHandle] = []
        self._is_busy = False

    def __enter__(self) -> Construction:
        self._hooks = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._shard_all_except(None)
        for held in self._whole.values():
            for param in held.values():
                clear_pending_owner(param)
        self._whole, self._module_ids, self._kept_alive = {}, {}, []

    def add_module(self, module: nn.Module) -> None:
        """Add the parameters of a module that was built outside of the context, submodule by submodule."""
        for inner in module.modules():
            for param in inner.parameters(recurse=False):
                self._add(param, inner)

    # -- hooks that torch calls -------------------------------------------------------------------------

    def _parameter_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._add(param, module)

    def _module_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Add the submodule's parameters: deepcopy does not call the registration hook of parameters."""
        if submodule is not None:
            self.add_module(submodule)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_busy:
            touched = touched_params(func, args, kwargs)
            # inside GatheredParameters a parameter is full, and a single rank may edit it
            needed = {
                id(p): p
                for p in touched
                if self._store.holds(p) and not self._store.is_overridden(p)
            }
            if needed:
                self._unshard(list(needed.values()))
        return func(*args, **kwargs)

    # -- full parameters and slices ---------------------------------------------------------------------

    def _add(self, param: nn.Parameter, module: nn.Module) -> None:
        if param.is_meta or self._is_whole(param) or find_owner(param) is not None:
            return
        self._shard_all_except(id(module))
        self._module_ids[id(param)] = id(module)
        self._keep_whole(param, id(module))
        self._kept_alive.append(param)

    def _is_whole(self, param: nn.Parameter) -> bool:
        return id(param) in self._whole.get(self._module_ids.get(id(param), 0), {})

    def _drop_whole(self, param: nn.Parameter) -> None:
        module_id = self._module_ids.get(id(param), 0)
        del self._whole[module_id][id(param)]
        if not self._whole[module_id]:
            del self._whole[module_id]
        clear_pending_owner(param)

    def _unshard(self, params: list[nn.Parameter]) -> None:
        self._shard_all_except(self._module_ids.get(id(params[0])))
        self._is_busy = True
        try:
            with torch.no_grad():
                for param in params:
                    self._store.unshard(param)
                    self._keep_whole(param, self._module_ids.get(id(param), 0))
        finally:
            self._is_busy = False

    def _keep_whole(self, param: nn.Parameter, module_id: int) -> None:
        self._whole.setdefault(module_id, {})[id(param)] = param
        set_pending_owner(param, lambda param: self._shard([param]))

    def _shard_all_except(self, module_id: int | None) -> None:
        others = [held for held_by, held in self._whole.items() if held_by != module_id]
        self._shard([param for held in others for param in held.values()])

    def _shard(self, leaving: list[nn.Parameter]) -> None:
        if not leaving:
            return
        self._is_busy = True
        try:
            with torch.no_grad():
                for param in leaving:
                    self._store.shard(param)
                    self._drop_whole(param)
        finally:
            self._is_busy = False


def materialise(
    model: nn.Module, construction: Construction | None, slices: Mapping[int, Slices] | None = None
) -> None:
    """Give a model on the meta device its initial values, module by module.

    - `reset_parameters` of each module runs first, then the model's `_init_weights(module)` as in transformers.
    - Children come before their parents. Constructors that end with `reset_parameters`, as torch's own do,
      draw in the same order, so values are bit-equal to plain construction.
    - `construction`: None keeps the values whole.
    - `slices`: id(parameter) -> its slices. Such a parameter is whole while its module draws its values.

    Raises:
        UsageError: modules with parameters or buffers on meta have no `reset_parameters`; names them.
    """
    on_meta = [
        (name, module, _initialisers(module, owner))
        for name, module, owner in _children_first(model, "", model)
        if any(_meta_tensors(module))
    ]
    without_method = [
        f"{name or type(module).__name__} ({type(module).__name__})"
        for name, module, initialisers in on_meta
        if not initialisers
    ]
    if without_method:
        raise UsageError(
            f"{', '.join(without_method[:5])}{' and more' if len(without_method) > 5 else ''} on the meta "
            "device: no reset_parameters() to make initial values with; pass weights= to xds.initialize, or "
            "build the model inside xds.zero.Init(config)"
        )
    with construction or nullcontext():
        for _, module, initialisers in on_meta:
            cut: list[tuple[Tensor, Slices]] = []
            for _, tensor in _meta_tensors(module):
                param_slices = None if slices is None else slices.get(id(tensor))
                shape = tensor.shape if param_slices is None else param_slices.whole_shape
                make_real(tensor, torch.empty(shape, dtype=tensor.dtype, device="cpu"))
                if param_slices is not None:
                    cut.append((tensor, param_slices))
            for initialise in initialisers:
                initialise()
            for tensor, param_slices in cut:
                tensor.data = taken(tensor.data, param_slices.box)
            if construction is not None:
                construction.add_module(module)


def _children_first(
    module: nn.Module, prefix: str, owner: nn.Module
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Name, module, and the nearest module around it that has `_init_weights`."""
    if callable(getattr(module, "_init_weights", None)):
        owner = module
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}{name}.", owner)
    yield prefix[:-1], module, owner


def _initialisers(module: nn.Module, owner: nn.Module) -> list[Callable[[], None]]:
    initialisers = [
        getattr(module, name)
        for name in ("reset_parameters", "_reset_parameters")
        if callable(getattr(module, name, None))
    ][:1]
    if callable(getattr(owner, "_init_weights", None)):
        by_owner: Callable[[nn.Module], None] = owner._init_weights  # type: ignore[assignment]
        initialisers.append(partial(by_owner, module))
    return initialisers


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.is_meta:
            yield name, tensor


def make_real(tensor: Tensor, real: Tensor) -> None:
    """Replace a tensor on meta by `real`, in place: references to it stay valid."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


__all__ = ["Construction", "make_real", "materialise"]
