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

from ..ops.boxes import Box
from ..utils.errors import UsageError
from .cut import Cut


def add_adapters(model: nn.Module, cut: Cut) -> None:
    """Add the adapters of the experts to `cut`. Their parameters are cut later, as those of experts.

    Raises:
        UsageError: an adapter has no part for each expert.
    """
    stacked = {found.module: found for found in cut.found if found.experts is None}
    for wrapper in _wrappers(model):
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
            for linear in getattr(wrapper, table).values():
                param = linear.weight
                whole = tuple(param.shape)
                num_runs = whole[dim] // num_experts if dim else 1
                run = whole[dim] // num_runs // num_experts  # elements of one expert in a run
                own, step = size * run, num_experts * run
                starts = [range(rank * own, whole[dim], step) for rank in range(cut.num_ranks)]
                cut.slices[id(param)] = tuple(
                    Box(whole, dim, tuple((start, start + own) for start in of_rank))
                    for of_rank in starts
                )
                cut.adapters.append(param)
        wrapper.num_experts = size


def _wrappers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_base_layer"):
            yield module


def outer_modules(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Modules that PEFT has wrapped -> the outermost wrapper of each."""
    outer: dict[nn.Module, nn.Module] = {}
    for wrapper in _wrappers(model):
        outer.setdefault(wrapper.get_base_layer(), wrapper)
    return outer


__all__ = ["add_adapters", "outer_modules"]
