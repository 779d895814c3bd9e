"""Features of the config: what is asked for there, and what an engine is built from."""

from __future__ import annotations

import random
from typing import Any

from .case import Case
from .feature import Feature


class CheckpointedByConfig(Feature):
    """The config asks for recomputation."""

    share = 0.06
    excludes = (
        "Checkpointed",
        "Reentrant",
        "OneReentrant",
        "NormBlock",
        "EmbeddingBlock",
        "SpectralNormBlock",
        "NoneBlock",
    )

    def configure(self, config: dict[str, Any]) -> None:
        config["activation_checkpointing"] = {"enabled": True}


class UnitsByName(Feature):
    """The config names the units: layers inside of blocks, or the blocks' classes."""

    share = 0.12

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.names = draw.choice(
            (["blocks.*"], ["Linear"], ["blocks.0", "out"], ["blocks.*.a", "inp"])
        )
        if case.uses("OnlyViewBlock", "ParameterBlock") and "blocks.*.a" in self.names:
            self.names = ["blocks.*"]

    def configure(self, config: dict[str, Any]) -> None:
        config["zero_optimization"]["units"] = self.names


class BuiltInSlices(Feature):
    """The model is built inside of zero.Init."""

    share = 0.08
    excludes = ("WeightNormBlock", "SpectralNormBlock")


class Autocast(Feature):
    """The config asks for autocast."""

    share = 0.05
    excludes = ("RecurrentBlock", "GradientPenalty", "DoubleBlock")

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision == "fp32"

    def configure(self, config: dict[str, Any]) -> None:
        config["torch_autocast"] = {"enabled": True, "dtype": "bf16"}


class WideMessages(Feature):
    """Gradients of 16 bits travel in 32."""

    share = 0.1

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.precision != "fp32"

    def configure(self, config: dict[str, Any]) -> None:
        config["communication_data_type"] = "fp32"


class WithoutNativeOps(Feature):
    """Updates run in plain torch."""

    share = 0.08

    def configure(self, config: dict[str, Any]) -> None:
        config["ops"] = {"native": False}
