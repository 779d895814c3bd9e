"""Layers of a pipeline that are described first and built later, on the rank that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..utils.arguments import items
from ..utils.errors import UsageError


class LayerSpec:
    """A layer that is built by `typename(*module_args, **module_kwargs)` on its own rank only.

    Raises:
        UsageError: `typename` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"LayerSpec({typename!r}): needs a subclass of torch.nn.Module; a function can be given to "
                "PipelineModule as it is"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"

    def build(self, log: bool = False) -> nn.Module:
        """A new module. `log` is ignored; DeepSpeed's scripts give it."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def build_on_meta(self) -> nn.Module:
        """A new module without memory; a real one where the class cannot be built on the meta device.

        The random state of the CPU does not change.
        """
        try:
            with torch.device("meta"):
                return self.build()
        except Exception:
            with torch.random.fork_rng():
                return self.build()


class TiedLayerSpec(LayerSpec):
    """A layer that shares a weight with every other layer of the same `key`.

    Args:
        key: the name of the shared module; at least two layers must have it.
        forward_fn: called as forward_fn(module, inputs) instead of the module.
        tied_weight_attr: dotted name or names of the shared parameters. Layers of one key and class share
            all parameters; layers of another class share those named here.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        if isinstance(tied_weight_attr, str):
            tied_weight_attr = [tied_weight_attr]
        self.tied_weight_attr = items("tied_weight_attr", tied_weight_attr, "names of parameters")


def check_ties(layers: Sequence[Any]) -> None:
    """Raises UsageError where a key is used by one layer only."""
    keys = [layer.key for layer in layers if isinstance(layer, TiedLayerSpec)]
    for key in dict.fromkeys(keys):
        if keys.count(key) < 2:
            raise UsageError(
                f'TiedLayerSpec key "{key}" is used by one layer only, so nothing is tied; give the key to '
                "both layers, or use LayerSpec"
            )


def share_weights(module: nn.Module, source: nn.Module, spec: TiedLayerSpec) -> None:
    """Replace the parameters named in `spec.tied_weight_attr` of `module` by those of `source`.

    Raises:
        UsageError: one of the modules has no parameter of this name, or the shapes differ.
    """
    for attr in spec.tied_weight_attr:
        ours, theirs = parameter_of(module, attr, spec), parameter_of(source, attr, spec)
        if ours.shape != theirs.shape:
            raise UsageError(
                f'TiedLayerSpec key "{spec.key}": {attr} has shape {tuple(ours.shape)} in '
                f"{type(module).__name__} and {tuple(theirs.shape)} in {type(source).__name__}; tied "
                "parameters need equal shapes"
            )
        owner, _, name = attr.rpartition(".")
        module.get_submodule(owner).register_parameter(name, theirs)


def parameter_of(module: nn.Module, attr: str, spec: TiedLayerSpec) -> nn.Parameter:
    """The parameter `attr` of a tied layer."""
    try:
        return module.get_parameter(attr)
    except AttributeError:
        raise UsageError(
            f'TiedLayerSpec key "{spec.key}": {type(module).__name__} has no parameter {attr}; name the shared '
            "parameter in tied_weight_attr"
        ) from None


__all__ = ["LayerSpec", "TiedLayerSpec", "check_ties", "parameter_of", "share_weights"]
