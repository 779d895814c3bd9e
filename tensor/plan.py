"""The plan: which module of a model is cut in which way, in the words of transformers.

    "layers.*.self_attn.q_proj": "colwise"      the outputs of the layer are cut; its input is whole
    "layers.*.self_attn.o_proj": "rowwise"      the inputs of the layer are cut; its output is summed
    "lm_head": "colwise_gather_output"          cut by columns, and the outputs are gathered

`*` stands for one part of a name, as a rule the number of a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from ..utils.errors import UsageError


class Word(Enum):
    """How a module is cut. The value is its text in a plan."""

    COLWISE = "colwise"
    COLWISE_GATHER = "colwise_gather_output"
    ROWWISE = "rowwise"
    PACKED_COLWISE = "packed_colwise"
    """As COLWISE; the outputs are several equal parts, such as gate and up."""
    ROWWISE_SPLIT = "rowwise_split_input"
    """As ROWWISE; the input is whole, and each rank takes its part of it."""
    PARTIAL = "replicated_with_grad_allreduce"
    """The module is whole on every rank, and works on what is cut: its gradients are summed over the ranks."""


CUTS_COLUMNS = frozenset({Word.COLWISE, Word.COLWISE_GATHER, Word.PACKED_COLWISE})


def read_plan(
    given: Mapping[str, str] | None, model: nn.Module, *, is_part: bool = False
) -> dict[str, Word]:
    """Module name -> its word, for every module that a pattern of the plan matches.

    Args:
        given: tensor_parallel.plan of the config; None takes the model's own.
        is_part: the model has the layers of one pipeline stage only, so a pattern may match nothing.

    Raises:
        UsageError: no plan, an unknown word, a pattern that matches nothing, or no linear layer.
    """
    plan = dict(given) if given is not None else plan_of_model(model)
    if not plan:
        raise UsageError(
            f"tensor_parallel: {type(model).__name__} has no plan that says how its layers are cut; write "
            'one in tensor_parallel.plan, as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        )
    modules = dict(model.named_modules())
    found: dict[str, Word] = {}
    for pattern, text in plan.items():
        word = _word(pattern, text)
        names = [name for name in modules if _matches(pattern, name)]
        if not names and not is_part:
            raise UsageError(
                f"tensor_parallel.plan: {pattern!r} matches no module of {type(model).__name__}; its modules "
                f"have names such as {_example(modules)}"
            )
        found.update(dict.fromkeys(names, word))
    for name in found:
        if found[name] is not Word.PARTIAL and not is_linear(modules[name]):
            raise UsageError(
                f"tensor_parallel.plan: {name} is a {type(modules[name]).__name__}; only linear layers "
                "(nn.Linear, transformers' Conv1D) can be cut; take it out of the plan"
            )
    return found


def plan_of_model(model: nn.Module) -> dict[str, str]:
    """The plan of a transformers model, with names from its root; empty where it has none."""
    config = getattr(model, "config", None)
    base: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    own: dict[str, str] = dict(getattr(type(model), "_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        base = {f"{prefix}.{pattern}": word for pattern, word in base.items()}
    return base | own


def is_linear(module: nn.Module) -> bool:
    """`module` computes x W^T + b, or x W + b as transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """The weight of `module` is [in_features, out_features]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _word(pattern: str, text: Any) -> Word:
    try:
        return Word(text)
    except ValueError:
        known = ", ".join(f'"{word.value}"' for word in Word)
        raise UsageError(
            f"tensor_parallel.plan: {pattern!r} = {text!r}: must be one of {known}"
        ) from None


def _matches(pattern: str, name: str) -> bool:
    parts = [re.escape(part).replace(r"\*", "[^.]+") for part in pattern.split(".")]
    return re.fullmatch(r"\.".join(parts), name) is not None


def _example(modules: Mapping[str, Any]) -> str:
    names = [name for name in modules if name]
    return ", ".join(names[len(names) // 2 :][:2]) or "none"


__all__ = ["CUTS_COLUMNS", "Word", "is_linear", "is_transposed", "plan_of_model", "read_plan"]
