"""How large the measurements on a GPU are; `TINY` is for a dry run on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from model import Shape

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Sizes of everything that is measured.

    models: by name, smallest first. tokens: of a step, by name, the most important first.
    largest: the width of the model whose number of layers is sought.
    """

    models: Mapping[str, Shape]
    tokens: Mapping[str, int]
    largest: Shape
    adam_numel: int
    copy_bytes: int
    matmul: tuple[tuple[int, int, int], ...]
    disk_bytes: int
    kept_free_bytes: int  # of device and host: activations, buffers, the process itself
    rounds: int = 5
    steps: int = 4
    max_layers: int = 400
    dry: bool = field(default=False)


_K = 1024

FULL = Scale(
    models={
        "1.5B": Shape(48, 1600, 25),
        "2.7B": Shape(32, 2560, 32),
        "6.7B": Shape(32, 4096, 32),
    },
    tokens={"32k": 32 * _K, "8k": 8 * _K, "16k": 16 * _K},
    largest=Shape(1, 5120, 40),
    adam_numel=256 * MIB,
    copy_bytes=1024 * MIB,
    matmul=((8192, 8192, 8192), (32 * _K, 4096, 16384)),
    disk_bytes=4096 * MIB,
    kept_free_bytes=8 << 30,
)

TINY = Scale(
    models={
        "1.5B": Shape(2, 32, 2, context=16, vocabulary=64),
        "2.7B": Shape(2, 48, 2, context=16, vocabulary=64),
        "6.7B": Shape(2, 64, 2, context=16, vocabulary=64),
    },
    tokens={"32k": 64, "8k": 16, "16k": 32},
    largest=Shape(1, 64, 2, context=16, vocabulary=64),
    adam_numel=MIB,
    copy_bytes=4 * MIB,
    matmul=((64, 64, 64), (64, 64, 128)),
    disk_bytes=8 * MIB,
    kept_free_bytes=0,
    rounds=2,
    steps=2,
    max_layers=6,
    dry=True,
)

__all__ = ["FULL", "TINY", "Scale"]
