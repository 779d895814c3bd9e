"""`deepspeed.zero`: builds and reads a sharded model, with DeepSpeed's arguments.

The names are those of `runtime.zero.partition_parameters`.
"""

from __future__ import annotations

from typing import Any

from .missing import placeholder
from .runtime.zero.partition_parameters import GatheredParameters as GatheredParameters
from .runtime.zero.partition_parameters import Init as Init
from .runtime.zero.partition_parameters import MiCS_Init as MiCS_Init
from .runtime.zero.partition_parameters import ZeroParamStatus as ZeroParamStatus
from .runtime.zero.partition_parameters import ZeroParamType as ZeroParamType
from .runtime.zero.partition_parameters import is_zero_param as is_zero_param
from .runtime.zero.partition_parameters import (
    register_external_parameter as register_external_parameter,
)
from .runtime.zero.partition_parameters import (
    unregister_external_parameter as unregister_external_parameter,
)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
