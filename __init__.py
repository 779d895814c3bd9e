"""xds: train PyTorch models that do not fit one device, steered by a JSON config.

Names are loaded on first use, so that `xds check` and `xds --help` never pay for importing torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from . import compression as compression
from . import pipe as pipe
from . import tensor as tensor
from . import zero as zero
from .utils import exports as _exports
from .utils.version import __version__ as __version__

if TYPE_CHECKING:
    from .engine.checkpoint.io.folders import newest_checkpoint as newest_checkpoint
    from .engine.checkpoint.io.reader import get_fp32_state_dict as get_fp32_state_dict
    from .engine.config.config import Config as Config
    from .engine.engine import Engine as Engine
    from .engine.inference.engine import InferenceEngine as InferenceEngine
    from .engine.inference.inference import init_inference as init_inference
    from .engine.initialize import initialize as initialize
    from .engine.preemption import Preempted as Preempted
    from .launcher.functions.launch import launch as launch
    from .utils.errors import ConfigError as ConfigError
    from .utils.errors import UsageError as UsageError
    from .utils.errors import XdsError as XdsError

deepspeed: Any  # for type checkers: its modules have no files, see engine/deepspeed

_LOCATIONS = {
    "initialize": ".engine.initialize",
    "init_inference": ".engine.inference.inference",
    "InferenceEngine": ".engine.inference.engine",
    "Engine": ".engine.engine",
    "Config": ".engine.config.config",
    "Preempted": ".engine.preemption",
    "launch": ".launcher.functions.launch",
    "newest_checkpoint": ".engine.checkpoint.io.folders",
    "get_fp32_state_dict": ".engine.checkpoint.io.reader",
    "XdsError": ".utils.errors",
    "ConfigError": ".utils.errors",
    "UsageError": ".utils.errors",
}

_PACKAGES = ("compression", "deepspeed", "pipe", "tensor", "zero")

# of the engine, which reads the whole config; lower packages must not import it
zero.LOCATIONS["Init"] = f"{__name__}.engine.model.zero_init"
for _name in (
    "CompressionScheduler",
    "init_compression",
    "redundancy_clean",
    "student_initialization",
):
    compression.LOCATIONS[_name] = f"{__name__}.engine.model.compressed_training"
compression.LOCATIONS["save_quantized"] = f"{__name__}.engine.checkpoint.exports.quantized"

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "InferenceEngine",
    "Preempted",
    "UsageError",
    "XdsError",
    "get_fp32_state_dict",
    "init_inference",
    "initialize",
    "launch",
    "newest_checkpoint",
]


class _DeepSpeedFinder:
    """Finds `xds.deepspeed` and the modules in it, which have no files: engine/deepspeed makes them."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != f"{__name__}.deepspeed" and not fullname.startswith(
            f"{__name__}.deepspeed."
        ):
            return None
        from .engine.deepspeed.stand_in import spec_of

        return spec_of(fullname)


sys.meta_path.append(_DeepSpeedFinder)


if not TYPE_CHECKING:  # type checkers then refuse unknown names

    def __getattr__(name: str) -> Any:
        if name == "deepspeed":
            return import_module(".deepspeed", __name__)
        return _exports.load(__name__, _LOCATIONS, name)


def __dir__() -> list[str]:
    return sorted([*_exports.names(__name__, _LOCATIONS), *_PACKAGES])
