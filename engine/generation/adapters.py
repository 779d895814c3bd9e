"""PEFT's adapters in weights that leave the engine: names without its wrappers, and LoRA added to its weights.

PEFT's own `merge_adapter` writes to the parameters, which at stage 3 have no values, and `unmerge_adapter`
leaves rounding errors in them. Here PEFT computes what is added, and it is added to the tensor that leaves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor, nn

from ...utils.errors import UsageError
from ...zero.core.owners import ParamOwner, find_owner
from ...zero.layout.groups import FlatGroups

# tables of PEFT's adapters that are a sum: LoRA, AdaLoRA, LoHa, LoKr, VeRA. `get_delta_weight` is what they add
SUMS = {"lora_A", "lora_embedding_A", "hada_w1_a", "lokr_w1", "vera_lambda_b"}
REMEDY = "set merge_adapters to False, and merge where the weights arrive"


@final
class AdapterNames:
    """The names of transformers for those of a model, where PEFT or torch.compile may have wrapped any part."""

    def __init__(self, module: nn.Module, *, merges: bool) -> None:
        self._merges = merges
        # path of a module -> the same without wrappers; None: its tensors are left out
        self._shown: dict[str, str | None] = {}
        self._add(module, "", "")

    def of(self, name: str) -> str | None:
        """None: the tensor is left out, as another one takes its place."""
        path, _, last = name.rpartition(".")
        while path not in self._shown:  # a module may name what it keeps as it likes
            path, _, more = path.rpartition(".")
            last = f"{more}.{last}"
        shown = self._shown[path]
        return None if shown is None else _joined(shown, last)

    def _add(self, module: nn.Module, path: str, shown: str | None) -> None:
        self._shown[path] = shown
        for name, child in module._modules.items():
            if child is None:
                continue
            below = _joined(path, name)
            place = _place(module, name)
            if place == "adapter":
                self._add(child, below, None if self._merges else below.replace("_orig_mod.", ""))
            elif place == "saved":
                self._shown[below] = shown
                for adapter, one in child._modules.items():
                    is_used = adapter in _active(module)
                    assert one is not None
                    self._add(one, _joined(below, adapter), shown if is_used else None)
            elif shown is None or place == "hidden":
                self._add(child, below, None)
            else:
                self._add(child, below, shown if place == "same" else _joined(shown, name))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _place(parent: nn.Module, name: str) -> str:
    """Where transformers has the child `name`: in the "same" place as `parent`, "below" it, or nowhere.

    PEFT's classes are known by what only they have, so that nothing is imported.
    """
    if name == "_orig_mod":
        return "same"
    if hasattr(type(parent), "adapter_layer_names"):
        if name in ("base_layer", "token_adapter"):
            return "same"
        if name == "modules_to_save":
            return "saved"
        if name == "original_module":
            copies = parent._modules.get("modules_to_save") or nn.ModuleDict()
            return "hidden" if set(_active(parent)) & set(copies._modules) else "same"
        return "adapter"
    if hasattr(type(parent), "inject_adapter"):  # a tuner
        return "same" if name == "model" else "adapter"
    if _is_peft_model(parent):
        return "same" if name == "base_model" else "adapter"
    return "below"


def _is_peft_model(module: nn.Module) -> bool:
    return "base_model" in module._modules and hasattr(module, "peft_config")


def _active(layer: Any) -> list[str]:
    """The adapters with which `layer` runs its forward."""
    if getattr(layer, "disable_adapters", False):
        return []
    return list(layer.active_adapters)


@final
class Deltas:
    """What the active LoRA adapters add to the weights of their layers."""

    def __init__(self, module: nn.Module, groups: FlatGroups) -> None:
        """Gather the adapters, which are small. A collective.

        Raises:
            UsageError: the adapters cannot be added to the weights here.
        """
        _check_no_prompts(module)
        self._layers: dict[int, Any] = {}
        self._full: dict[int, tuple[ParamOwner, Tensor]] = {}
        for layer in module.modules():
            if hasattr(type(layer), "adapter_layer_names") and "base_layer" in layer._modules:
                self._add(layer)
        homes = Counter(id(p) for one in module.modules() for p in one.parameters(recurse=False))
        if any(homes[own] > 1 for own in self._layers):
            raise UsageError(
                "engine.weights(merge_adapters=True): an adapter changes a weight that is tied to another "
                f"layer, which does not see the adapter; {REMEDY}"
            )
        tuned = {id(p): p for layer in self._layers.values() for p in _tuned(layer)}
        if not groups.slices.keys().isdisjoint([*self._layers, *tuned]):
            raise UsageError(
                "engine.weights(merge_adapters=True): tensor_parallel or expert_parallel has cut layers of the "
                f"adapters; {REMEDY}"
            )
        for param in tuned.values():
            owner = find_owner(param)
            if owner is not None and not owner.compute(param).is_full:
                full = owner.compute(param).read(owner.group_of(param))
                assert full is not None
                self._full[id(param)] = owner, full

    def _add(self, layer: Any) -> None:
        tables = _tables(layer)
        active = [a for a in _active(layer) if any(a in getattr(layer, name) for name in tables)]
        if not active or getattr(layer, "merged", False):
            return
        variants = ("lora_variant", "use_dora", "lora_bias")
        if any(getattr(layer, name, {}).get(a) for name in variants for a in active):
            kind = "with DoRA, a bias, or another variant of LoRA"
        elif SUMS.isdisjoint(tables):
            kind = f"in {type(layer).__module__}.{type(layer).__name__}"
        else:
            kind = ""
        if kind:
            raise UsageError(
                f"engine.weights(merge_adapters=True): an adapter {kind} is no sum of weights; {REMEDY}"
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
            for adapter in _active(layer):
                if any(adapter in getattr(layer, name) for name in _tables(layer)):
                    values = values + layer.get_delta_weight(adapter).to(values.dtype)
        finally:
            for param in shown:
                self._full[id(param)][0].clear_override(param)
        return values


def _check_no_prompts(module: nn.Module) -> None:
    """
    Raises:
        UsageError: prompts that PEFT has trained are in no weight.
    """
    for one in module.modules():
        if _is_peft_model(one) and "prompt_encoder" in one._modules:
            raise UsageError(
                "engine.weights(merge_adapters=True): PEFT's trained prompts are no part of a weight; set "
                "merge_adapters to False"
            )


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
