"""LoRA on stacked experts: each rank keeps what PEFT's adapters have for its experts.

    lora_A [E x r, in]     rows e x r to (e + 1) x r are of expert e
    lora_B [out, r x E]    columns e, E + e, 2 E + e, ... are of expert e

PEFT wraps the module of experts once for each stacked parameter that has adapters, and reads `num_experts` of
the wrapper. It is known by what only it has, so that nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..utils.errors import UsageError
from .cut import Cut, CutExperts


def add_adapters(model: nn.Module, cut: Cut) -> None:
    """Add the adapters of the experts to `cut`. Their parameters are cut later, as those of experts.

    Raises:
        UsageError: an adapter has no part for each expert.
    """
    stacked = {found.module: found for found in cut.found if found.experts is None}
    for name, wrapper in _wrappers(model):
        found = stacked.get(wrapper.get_base_layer())
        if found is None or cut.num_ranks == 1:
            continue
        num_experts, size = found.num_experts, found.num_experts // cut.num_ranks
        if wrapper.num_experts != num_experts:
            raise UsageError(
                f"expert_parallel.autoep_size = {cut.num_ranks}: the adapter of {found.name}."
                f"{wrapper.parameter_name} has no part for each of its {num_experts} experts; leave it out of "
                "target_parameters, or set autoep_size to 1"
            )
        for table, dim in (("lora_A", 0), ("lora_B", 1)):
            for adapter, linear in getattr(wrapper, table).items():
                param = linear.weight
                whole = tuple(param.shape)
                num_runs = whole[dim] // num_experts if dim else 1
                run = whole[dim] // num_runs // num_experts  # elements of one expert in a run
                by_rank = tuple(
                    tuple(
                        (start, start + size * run)
                        for start in range(other * size * run, whole[dim], num_experts * run)
                    )
                    for other in range(cut.num_ranks)
                )
                full = f"{name}.{table}.{adapter}.weight"
                cut.slices[id(param)] = CutExperts(full, whole, dim, by_rank)
                cut.adapters.append(param)
        wrapper.num_experts = size


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_base_layer"):
            yield name, module


def outer_module(model: nn.Module, experts: nn.Module) -> nn.Module:
    """What calls `experts`: PEFT's outermost wrapper around it, or the module itself."""
    for _, wrapper in _wrappers(model):
        if wrapper.get_base_layer() is experts:
            found: nn.Module = wrapper
            return found
    return experts


__all__ = ["add_adapters", "outer_module"]
