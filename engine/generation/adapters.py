"""PEFT's adapters in weights that leave the engine: names without its wrappers, and LoRA added to its weights.

PEFT's own `merge_adapter` writes to the parameters, which at stage 3 have no values, and `unmerge_adapter`
leaves rounding errors in them. Here PEFT computes what is added, and it is added to the tensor that leaves.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from ...zero.core.owners import ParamOwner, find_owner
from ...zero.layout.groups import FlatGroups

PREFIX = "base_model.model."
SAVED = "modules_to_save."


@final
class AdapterNames:
    """The names of transformers for those of a model, which PEFT or torch.compile may have wrapped."""

    def __init__(self, module: nn.Module, *, merges: bool) -> None:
        self._is_peft = hasattr(module, "peft_config")
        self._merges = merges
        self._tuner = str(getattr(module, "prefix", None) or "lora_")
        found: Any = module.active_adapters if self._is_peft else ()
        self._active = {str(name) for name in found}

    def of(self, name: str) -> str | None:
        """None: the tensor is left out, as another one takes its place."""
        name = name.replace("_orig_mod.", "")
        if not self._is_peft:
            return name
        if self._tuner in name:
            return None if self._merges else name
        if "original_module." in name:
            return None
        if SAVED in name:
            before, _, after = name.partition(SAVED)
            adapter, _, rest = after.partition(".")
            if adapter not in self._active:
                return None
            name = before + rest
        return name.removeprefix(PREFIX).replace(".base_layer.", ".")


@final
class Deltas:
    """What the active LoRA adapters add to the weights of their layers."""

    def __init__(self, module: nn.Module, groups: FlatGroups) -> None:
        """Gather the adapters, which are small. A collective.

        Raises:
            UsageError: the adapters cannot be added to the weights here.
        """
        self._layers: dict[int, Any] = {}
        self._full: dict[int, tuple[ParamOwner, Tensor]] = {}
        for layer in module.modules():
            if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
                self._add(layer)
        if groups.slices and self._layers:
            raise UsageError(
                "engine.weights(merge_adapters=True): tensor_parallel has cut the layers of the adapters; set "
                "merge_adapters to False, and merge where the weights arrive"
            )
        tuned = {id(p): p for layer in self._layers.values() for p in _tuned(layer)}
        for param in tuned.values():
            owner = find_owner(param)
            if owner is not None and not owner.compute(param).is_full:
                full = owner.compute(param).read(owner.group_of(param))
                assert full is not None
                self._full[id(param)] = owner, full

    def _add(self, layer: Any) -> None:
        if getattr(layer, "merged", False):
            return
        has_dora = any(getattr(layer, "use_dora", {}).values())
        if has_dora or any(getattr(layer, "lora_bias", {}).values()):
            raise UsageError(
                "engine.weights(merge_adapters=True): an adapter has use_dora or lora_bias, which is no sum of "
                "weights; set merge_adapters to False, and merge where the weights arrive"
            )
        name = getattr(layer, "parameter_name", "weight")
        own = layer.get_param() if hasattr(layer, "get_param") else getattr(layer.base_layer, name)
        self._layers[id(own)] = layer

    def has(self, tensor: Tensor) -> bool:
        """Something is added to `tensor`."""
        return id(tensor) in self._layers

    @torch.no_grad()
    def merged(self, source: Tensor, values: Tensor) -> Tensor:
        """`values` of the parameter `source`, with what its layer adds."""
        layer = self._layers.get(id(source))
        if layer is None:
            return values
        shown = [param for param in _tuned(layer) if id(param) in self._full]
        for param in shown:
            owner, full = self._full[id(param)]
            owner.override(param, full)
        try:
            for adapter in layer.active_adapters:
                if any(adapter in getattr(layer, name) for name in _tables(layer)):
                    values = values + layer.get_delta_weight(adapter).to(values.dtype)
        finally:
            for param in shown:
                self._full[id(param)][0].clear_override(param)
        return values


def _tables(layer: Any) -> list[str]:
    """Names of the dicts of `layer` that have a matrix for each adapter."""
    return [name for name in layer.adapter_layer_names if hasattr(layer, name)]


def _tuned(layer: Any) -> list[nn.Parameter]:
    """The parameters of the adapters of `layer`."""
    found: list[nn.Parameter] = []
    for name in _tables(layer):
        table = getattr(layer, name)
        if isinstance(table, nn.ParameterDict):
            found += table.values()
        elif isinstance(table, nn.Module):
            found += table.parameters()
    return found


__all__ = ["AdapterNames", "Deltas"]
