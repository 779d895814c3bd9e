"""Where weights are read from: a state dict, or files. Tensors are read in parts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from os.path import isdir
from pathlib import Path
from typing import Any, final

from torch import Tensor

from ...ops.weights.files import ADAPTER, ENTRIES, find_weights, read_weights
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...utils.quoting import printable
from ..layout.slices import Reader

log = logging.getLogger("xds")


class WeightSource(ABC):
    """Named tensors that are read in parts. `source` names them in messages.

    remedy: what to do where they do not fit the model; "": what the caller of `load_weights` says.
    """

    source: str
    remedy = ""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Every tensor's name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor, 1-D."""

    def reader(self, name: str) -> Reader:
        """A function that reads elements [start, stop) of the tensor `name`."""
        return lambda start, stop: self.read(name, start, stop)


@final
class Weights(WeightSource):
    """Tensors in memory, or mapped from files."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str = "the state dict") -> None:
        self.source = source
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor):  # a state dict of user code's own
            raise wrong(f"{self.source}: {printable(name)}", tensor, "a tensor, or left out")
        return tuple(tensor.shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].detach().reshape(-1)[start:stop]


def open_weights(source: Any) -> WeightSource:
    """The weights in `source`: a state dict, a file, an index, or a folder with one of them; or itself.

    Raises:
        UsageError: `source` has no readable weights.
    """
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, Mapping):
        return Weights({str(name): value for name, value in source.items()})
    if not isinstance(source, str | PathLike):
        raise wrong("weights", source, "a state dict, or the path of a file or folder")
    path = Path(source)
    file = find_weights(path)
    if file is None and isdir(path):
        raise UsageError(
            f"weights: {printable(path)} holds none of {', '.join((*ENTRIES, ADAPTER))}; give a folder "
            "that a model was saved to, or the path of a file"
        )
    if file is None:
        raise UsageError(
            f"weights: {printable(path)} does not exist; give a file, a folder or a state dict"
        )
    read = read_weights(file)
    for note in read.notes:
        log.info("weights: %s: %s", file, printable(note))
    return Weights(read.tensors, str(file))


__all__ = ["WeightSource", "Weights", "open_weights"]
