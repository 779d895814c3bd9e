"""The section outer: groups of ranks that train alone and meet every so many steps. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, final

from pydantic import BeforeValidator, Field

from ..utils.schema.section import Report, Section, nested
from ..utils.schema.values import BelowOne, Count, Flag, Natural, Positive, read_whole, shown

Bits = Annotated[Literal[32, 8, 4, 2], BeforeValidator(read_whole)]


class Neighbours(Protocol):
    """What the rules read of the other sections."""

    @property
    def zero_optimization(self) -> Any: ...
    @property
    def checkpoint(self) -> Any: ...
    @property
    def recovery(self) -> Any: ...
    @property
    def elasticity(self) -> Any: ...
    @property
    def autotuning(self) -> Any: ...
    @property
    def compression_training(self) -> Any: ...
    @property
    def quantize_training(self) -> Any: ...
    @property
    def optimizer_type(self) -> str: ...
    @property
    def data_efficiency(self) -> Any: ...


@final
class OuterParams(Section):
    """The numbers of the outer optimizer."""

    lr: Positive = Field(0.7, description="the learning rate; 1 with type SGD takes the mean")
    momentum: BelowOne = Field(0.9, description="of the outer gradients; 0: there is none")


@final
class OuterOptimizer(Section):
    """What updates the outer parameters with the mean of the outer gradients."""

    type: Literal["Nesterov", "SGD"] = Field(
        "Nesterov", description="SGD with Nesterov's momentum, or with plain momentum"
    )
    params: OuterParams = nested(OuterParams, "its learning rate and momentum")


@final
class Outer(Section):
    """Groups of ranks, such as the sites of a run, train alone; their parameters meet every `steps` steps."""

    groups: Count = Field(
        2, description="groups of equally many ranks; the first ranks are the first group"
    )
    steps: Count = Field(30, description="steps of a group between two meetings of a fragment")
    optimizer: OuterOptimizer = nested(OuterOptimizer, "what updates the outer parameters")
    fragments: Count = Field(
        1,
        description="parts of the model that meet one after the other, each once in `steps` steps",
    )
    delay: Natural = Field(
        0, description="steps from the start of a meeting to its effect; groups go on meanwhile"
    )
    mix: BelowOne = Field(
        0.0, description="the share of a group's own values when a meeting takes effect"
    )
    bits: Bits = Field(
        32, description="of an element in messages between groups; below 32 errors are fed back"
    )
    quorum: Count | None = Field(
        None,
        description="with recovery.enabled: a meeting is held with so many groups if the others do not come in "
        "two windows; null: all that live and are not stopped",
    )
    window_seconds: Positive = Field(
        5.0,
        description="with recovery.enabled: after so long in a meeting a group calls the others, which come "
        "after the step that they are in",
    )
    private_network: Flag = Field(
        False,
        description="links between the sites of the hostfile are private, as in a VPN: groups send plain TCP",
    )

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. Names what does not work together, and what is not built."""
        if self.delay >= self.steps:
            report.complain(
                "outer.delay",
                self.delay,
                f"must be below outer.steps ({self.steps}): a meeting takes effect before the next one",
            )
        if self.fragments > self.steps:
            report.complain(
                "outer.fragments",
                self.fragments,
                f"must be at most outer.steps ({self.steps}): one fragment meets after a step",
            )
        self._check_recovery(config, report)
        zero, sampling = config.zero_optimization, config.data_efficiency.data_sampling
        refused = {
            "zero_optimization.zero_hpz_partition_size, zero_quantized_weights and _gradients": (
                "ZeRO++",
                zero.compresses,
            ),
            "zero_optimization.shared_parameters": (True, zero.shared_parameters),
            "optimizer.type": (config.optimizer_type, config.optimizer_type.startswith("OneBit")),
            "elasticity.enabled": (True, config.elasticity.enabled),
            "autotuning.enabled": (True, config.autotuning.enabled),
            "checkpoint.async_save": (True, config.checkpoint.async_save),
            "checkpoint.interval": (config.checkpoint.interval, bool(config.checkpoint.interval)),
            "checkpoint.preemption_save_dir": (
                config.checkpoint.preemption_save_dir,
                bool(config.checkpoint.preemption_save_dir),
            ),
            "compression_training": ("a section", config.compression_training.enabled),
            "quantize_training": ("a section", config.quantize_training.is_on),
            "data_efficiency.data_sampling": (
                "batches of unequal sizes",
                sampling.has_dynamic_batches,
            ),
        }
        for key, (value, is_refused) in refused.items():
            if is_refused:
                report.complain(
                    key, value, "does not work with the section outer; change it, or remove outer"
                )

    def _check_recovery(self, config: Neighbours, report: Report) -> None:
        if not config.recovery.enabled:
            if self.quorum is not None:
                report.complain(
                    "outer.quorum",
                    self.quorum,
                    "needs recovery.enabled and `xds --recover`; without them all groups meet",
                )
            return
        if self.quorum is not None and self.quorum > self.groups:
            report.complain(
                "outer.quorum", self.quorum, f"must be at most outer.groups ({self.groups})"
            )
        if self.fragments <= self.steps and self.steps // self.fragments <= self.delay < self.steps:
            report.complain(
                "outer.delay",
                self.delay,
                f"must be below outer.steps / outer.fragments ({self.steps // self.fragments}) with "
                "recovery.enabled: a meeting takes effect before the next one starts",
            )

    def complaints(self, world_size: int) -> list[str]:
        """What is wrong with the number of ranks."""
        if world_size % self.groups == 0:
            return []
        return [
            f"outer.groups = {shown(self.groups)}: must divide the number of ranks ({world_size}), so that "
            "every group has as many; change it, or start other ranks"
        ]


__all__ = ["Outer", "OuterOptimizer", "OuterParams"]
