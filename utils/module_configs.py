"""Private copies of the configs that the modules of a model hold, so that a change reaches no other model.

A model of transformers and all its modules hold one config object. The script may hold it as well, and build
other models of it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

Place = tuple["weakref.ref[nn.Module]", str, Any, Any]  # module, attribute, given config, its copy


def own_configs(model: nn.Module) -> Callable[[], None]:
    """Put copies of the configs that choose an attention into the modules of `model`.

    Returns:
        what puts the given configs back. A copy that user code has changed stays.
    """
    memo: dict[int, Any] = {}  # a config in another one is copied once
    places: list[Place] = []
    for module in model.modules():
        for name, config in list(vars(module).items()):
            if name.endswith("config") and hasattr(config, "_attn_implementation"):
                own = copy.deepcopy(config, memo)
                setattr(module, name, own)
                places.append((weakref.ref(module), name, config, own))

    def restore() -> None:
        for module_ref, name, given, own in places:
            module = module_ref()  # None: the module is of another pipeline stage
            if module is not None and vars(module).get(name) is own and vars(own) == vars(given):
                setattr(module, name, given)

    return restore


__all__ = ["own_configs"]
