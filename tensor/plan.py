"""Reads a plan: name patterns of modules with words -> the way in which each module is cut.

`*` stands for one part of a name, as a rule the number of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..utils.errors import UsageError
from .same_batches import has_dropout
from .styles import ALIASES, KEEPS_WHOLE, REFUSED, ParallelStyle, StyleName, is_linear

ParallelPlan = dict[str, ParallelStyle]


def read_plan(
    plan: Mapping[str, Any],
    model: nn.Module,
    apart: Collection[str] = (),
    *,
    is_part: bool = False,
) -> ParallelPlan:
    """Module name -> how it is cut, for every module that a pattern of tensor_parallel.plan matches.

    Args:
        apart: modules that stay whole: patterns for them, and for what is in them, have no effect.
        is_part: the model has the layers of one pipeline stage only, so a pattern may match nothing.

    Raises:
        UsageError: an unknown word, a pattern that matches nothing, or a module that cannot be cut so.
    """
    return _read(_without(plan, apart), model, is_part=is_part)


def own_plan(model: nn.Module, apart: Collection[str] = ()) -> ParallelPlan:
    """As `read_plan`, for the model's own plan; {}: it has none. A pattern may match nothing."""
    return _read(_without(plan_of_model(model), apart), model, is_part=True)


def is_inside(name: str, modules: Collection[str]) -> bool:
    """`name` is one of `modules`, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _without(plan: Mapping[str, Any], apart: Collection[str]) -> dict[str, Any]:
    """`plan` without the patterns for `apart`, also for parameters in them."""

    def is_for(pattern: str, name: str) -> bool:
        begin = pattern.split(".")[: name.count(".") + 1]
        return _matches(".".join(begin), name)

    return {
        pattern: text
        for pattern, text in plan.items()
        if not any(is_for(pattern, name) for name in apart)
    }


def plan_of_model(model: nn.Module) -> dict[str, str]:
    """The plan of a transformers model, with names from its root; empty where it has none."""
    config = getattr(model, "config", None)
    base: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    head_plan: dict[str, str] = dict(getattr(type(model), "_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        base = {f"{prefix}.{pattern}": style_name for pattern, style_name in base.items()}
    return base | head_plan


def plan_with_tokens(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """The plan of a transformers model with `sequence_parallel` for one norm of each block.

    {}: it has no plan, or one with layers that are not cut, or a block has no norm, or has dropout.
    """
    names = [name for name, _ in model.named_modules()]
    plan = {
        pattern: text
        for pattern, text in plan_of_model(model).items()
        if any(_matches(pattern, name) for name in names)
    }
    if any(str(text).startswith(tuple(REFUSED)) for text in plan.values()):
        return {}
    for name, block in blocks if plan else ():
        norms = [
            key for key, each in block.named_children() if "norm" in type(each).__name__.lower()
        ]
        if not norms or any(map(has_dropout, block.modules())):
            return {}
        pattern = ".".join(
            "*" if part.isdigit() else part for part in f"{name}.{norms[0]}".split(".")
        )
        plan[pattern] = StyleName.TOKENS.value
    return plan


def check_module(name: str, module: nn.Module, style_name: StyleName) -> None:
    """
    Raises:
        UsageError: `module` cannot be cut as `style_name` says.
    """
    if style_name in KEEPS_WHOLE:
        return
    if style_name is StyleName.EMBEDDING:
        _check_embedding(name, module)
    elif not is_linear(module):
        inner = next(
            (
                inner_name
                for inner_name, submodule in module.named_modules()
                if is_linear(submodule)
            ),
            "",
        )
        raise UsageError(
            f"tensor_parallel.plan: {name} is a {type(module).__name__}; only linear layers "
            "(nn.Linear, transformers' Conv1D) can be cut; "
            + (f"write a plan with {name}.{inner} instead" if inner else "take it out of the plan")
        )
    elif module._parameters.get("weight") is None:
        raise UsageError(
            f"tensor_parallel.plan: the weight of {name} is computed from other parameters, as by "
            "weight_norm, and cannot be cut; take it out of the plan"
        )


def _check_embedding(name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Embedding):
        raise UsageError(
            f"tensor_parallel.plan: {name} is a {type(module).__name__}; only nn.Embedding can be "
            f'"{StyleName.EMBEDDING.value}"; take it out of the plan'
        )
    # a class that scales its output is linear in the rows; one that moves the ids looks up other rows
    if type(module).forward is not nn.Embedding.forward and not hasattr(module, "embed_scale"):
        raise UsageError(
            f"tensor_parallel.plan: {name} is a {type(module).__name__} with a forward of its own, which may "
            "look up other rows; take it out of the plan"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise UsageError(
                f"tensor_parallel.plan: {name} has {option} = {getattr(module, option)}, which needs all rows "
                "on a rank; take it out of the plan"
            )


def _read(plan: Mapping[str, Any], model: nn.Module, *, is_part: bool) -> ParallelPlan:
    modules = dict(model.named_modules())
    styles: ParallelPlan = {}
    for pattern, text in plan.items():
        names = [name for name in modules if _matches(pattern, name)]
        if not names and is_part:
            continue
        style_name = _style_name(pattern, text)
        if not names:
            raise UsageError(
                f"tensor_parallel.plan: {pattern!r} matches no module of {type(model).__name__}; its modules "
                f"have names such as {_example(modules)}"
            )
        styles.update(dict.fromkeys(names, ParallelStyle(style_name)))
    for name, style in styles.items():
        check_module(name, modules[name], style.name)
    return {name: style for name, style in styles.items() if style.name is not StyleName.WHOLE}


def _style_name(pattern: str, text: Any) -> StyleName:
    if text in ALIASES:
        return ALIASES[text]
    reason = next((why for start, why in REFUSED.items() if str(text).startswith(start)), None)
    if reason is not None:
        raise UsageError(
            f"tensor_parallel.plan: {pattern!r} = {text!r}: {reason}; write a tensor_parallel.plan without it, "
            "or set tensor_parallel.tp_size to 1"
        )
    try:
        style_name = StyleName(text)
    except ValueError:
        style_name = StyleName.VOCABULARY
    if style_name is StyleName.VOCABULARY:
        names = [each.value for each in StyleName if each is not StyleName.VOCABULARY]
        known = ", ".join(f'"{name}"' for name in names)
        raise UsageError(f"tensor_parallel.plan: {pattern!r} = {text!r}: must be one of {known}")
    return style_name


def _matches(pattern: str, name: str) -> bool:
    """Whether the dotted name matches. `*` stands for one or more characters of a part."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(_matches_part, wanted, parts))


def _matches_part(pattern: str, part: str) -> bool:
    first, *others = pattern.split("*")
    if not others:
        return pattern == part
    if not part.startswith(first):
        return False
    *middle, last = others
    begin = len(first)
    for piece in middle:  # the first place is the best: it leaves most to the pieces after it
        begin = part.find(piece, begin + 1)
        if begin < 0:
            return False
        begin += len(piece)
    return part.endswith(last) and begin < len(part) - len(last)


def _example(modules: Mapping[str, Any]) -> str:
    names = [name for name in modules if name]
    return ", ".join(names[len(names) // 2 :][:2]) or "none"


__all__ = [
    "ParallelPlan",
    "check_module",
    "is_inside",
    "own_plan",
    "plan_of_model",
    "plan_with_tokens",
    "read_plan",
]
