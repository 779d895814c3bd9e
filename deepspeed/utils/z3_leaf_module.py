"""`deepspeed.utils.z3_leaf_module`: a module and a function in DeepSpeed, so this module is callable."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

from ..missing import placeholder
from . import leaf_modules
from .leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
from .leaf_modules import set_z3_leaf_module as set_z3_leaf_module
from .leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from .leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from .leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from .leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
from .leaf_modules import z3_leaf_module as z3_leaf_module
from .leaf_modules import z3_leaf_parameter as z3_leaf_parameter


class _Called(ModuleType):
    """A callable module: importing this module hides the function with its name in the package."""

    def __call__(self, model: nn.Module) -> bool:
        return leaf_modules.z3_leaf_module(model)


sys.modules[__name__].__class__ = _Called


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
