"""`deepspeed.module_inject.autotp_config`: which parameters are divided between tensor ranks, for reading.

The engine of xds does not take these objects: its own plans are in the section tensor_parallel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...utils.errors import UsageError
from ..errors import raises_theirs
from ..missing import placeholder
from ..utils.logging import logger

Shape = tuple[Any, ...]


class PartitionType(Enum):
    """COLUMN: each rank has some outputs. ROW: some inputs. SKIP: the parameter stays whole."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


def _as_tuples(shape: Any) -> Any:
    return tuple(_as_tuples(one) for one in shape) if isinstance(shape, (list, tuple)) else shape


@dataclass
class TPLayerSpec:
    """How the parameters whose names match one of `patterns` are divided.

    Attributes:
        patterns: regular expressions, from the beginning of a name on.
        shape: of the parameter before it is divided; -1: not given. A tuple at `partition_dim` has the sizes of
            parts that are divided one by one, such as queries, keys and values.
        partition_dim: None: 0 for COLUMN, else 1.
        model_types: only in models of these types.
        gather_output: every rank gets all outputs.
        grad_allreduce: a whole parameter whose gradients are added over the ranks.
    Raises:
        UsageError: a shape that cannot be divided so.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Shape | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    @raises_theirs
    def __post_init__(self) -> None:
        if isinstance(self.partition_type, str):
            self.partition_type = PartitionType(self.partition_type.lower())
        if self.shape is not None:
            self.shape = _as_tuples(self.shape)
            self._check_shape()

    def _check_shape(self) -> None:
        shape, dim = self.shape, self.get_partition_dim()
        if not isinstance(shape, tuple) or not 0 <= dim < len(shape):
            raise UsageError(
                f"shape = {shape!r} with partition_dim {dim} is out of range: needs a tuple that has it"
            )
        for at, size in enumerate(shape):
            if isinstance(size, tuple):
                is_right = at == dim and size and all(type(one) is int and one > 0 for one in size)
                need = f"nested tuple only allowed at partition_dim = {dim}, of positive integers"
            else:
                is_right = type(size) is int and (size > 0 or size == -1)
                need = "needs positive integers or -1"
            if not is_right:
                raise UsageError(f"shape = {shape!r}, dimension {at}: {need}")

    def get_partition_dim(self) -> int:
        """The dimension that is divided."""
        if self.partition_dim is not None:
            return self.partition_dim
        return 0 if self.partition_type is PartitionType.COLUMN else 1

    def _divided(self) -> Any:
        """The entry of `shape` there; None without one."""
        dim = self.get_partition_dim()
        return self.shape[dim] if self.shape is not None and dim < len(self.shape) else None

    def has_unequal_sub_params(self) -> bool:
        return isinstance(self._divided(), tuple)

    def get_sub_param_sizes(self) -> tuple[int, ...] | None:
        """The sizes of parts that are divided one by one; None: they are equal, or there is one."""
        return self._divided() if self.has_unequal_sub_params() else None

    def get_num_sub_params(self) -> int | None:
        size = self._divided()
        if isinstance(size, tuple):
            return len(size)
        return size if size is not None and size > 0 else None

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether the parameter is one of these."""
        if self.model_types:
            known = {str(one).lower() for one in self.model_types}
            if model_type is None or model_type.lower() not in known:
                return False
        return any(re.match(pattern, param_name) for pattern in self.patterns)


@dataclass
class AutoTPConfig:
    """The specs of a model, of which the first that matches a parameter counts."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(
        self, param_name: str, model_type: str | None = None
    ) -> TPLayerSpec | None:
        """The spec of a parameter; None: it has none. Several are logged."""
        found = [spec for spec in self.layer_specs if spec.matches(param_name, model_type)]
        if len(found) > 1:
            logger.warning("%s matches several layer_specs; the first counts", param_name)
        return found[0] if found else None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> AutoTPConfig:
        """From DeepSpeed's section tensor_parallel.partition_config."""
        known = {
            name: config_dict[name] for name in cls.__dataclass_fields__ if name in config_dict
        }
        specs = [
            TPLayerSpec(
                **{name: spec[name] for name in TPLayerSpec.__dataclass_fields__ if name in spec}
            )
            for spec in known.pop("layer_specs", [])
        ]
        return cls(layer_specs=specs, **known)


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


__all__ = ["AutoTPConfig", "PartitionType", "TPLayerSpec"]
