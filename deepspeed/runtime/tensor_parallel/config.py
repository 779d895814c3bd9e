"""`deepspeed.runtime.tensor_parallel.config`: the plan of a transformers model for tensor ranks."""

from __future__ import annotations

from typing import Any

from ...missing import placeholder


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """Pattern of names -> style, of the model's config, class and object; None where none has a plan.

    A pattern that another one repeats with the prefix "model." is taken once.
    """
    places = (
        getattr(getattr(model, "config", None), "base_model_tp_plan", None),
        getattr(type(model), "_tp_plan", None),
        vars(model).get("_tp_plan") if hasattr(model, "__dict__") else None,
    )
    found: dict[str, str] = {}
    for plan in places:
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            if pattern.removeprefix("model.") not in found or pattern in found:
                found[pattern] = style
    return found or None


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
