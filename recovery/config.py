"""The section recovery: what happens to a run when one of its ranks fails. Imports no torch."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any, Protocol, final

from pydantic import Field

from ..utils.schema.section import Report, Section
from ..utils.schema.values import Count, Flag, Natural, shown

if TYPE_CHECKING:
    from ..ops.mesh import Mesh

# Buffers are divided equally over any number of units from min_units to all. Their sizes are multiples of
# 16 elements times the least common multiple of these numbers: 1.8 MB of fp32 at this limit.
MOST_PARTS = 27_720  # of 1 to 12 units


SCHEDULES = ("gpipe", "1f1b", "zero_bubble")  # of pipelines, with any number of micro-batches


class Neighbours(Protocol):
    """What the rules read of the other sections."""

    @property
    def zero_optimization(self) -> Any: ...
    @property
    def checkpoint(self) -> Any: ...
    @property
    def expert_parallel(self) -> Any: ...
    @property
    def elasticity(self) -> Any: ...
    @property
    def data_packing(self) -> Any: ...
    @property
    def data_efficiency(self) -> Any: ...
    @property
    def compression_training(self) -> Any: ...
    @property
    def quantize_training(self) -> Any: ...
    @property
    def progressive_layer_drop(self) -> Any: ...
    @property
    def curriculum_learning(self) -> Any: ...
    @property
    def watch(self) -> Any: ...
    @property
    def outer(self) -> Any: ...
    @property
    def pipeline(self) -> Any: ...
    @property
    def model_ranks(self) -> int: ...
    @property
    def optimizer_type(self) -> str: ...
    @property
    def managed_gradient_accumulation(self) -> bool: ...


@final
class Recovery(Section):
    """The ranks that are left when one fails go on in the same processes."""

    enabled: Flag = Field(
        False,
        description="when a rank fails, the others drop the running step and go on without it; needs "
        "`xds --recover`",
    )
    copies: Count = Field(
        1,
        description="where all ranks together hold one copy of the states (stages 1 to 3 without "
        "mics_shard_size), 1 keeps the last two steps in the shared memory of this host, and in that of the "
        "next one if there are several; only 1 is built",
    )
    spare_hosts: Natural = Field(
        0,
        description="at least so many hosts of the hostfile wait for the place of another one when training "
        "starts; they are marked `spare` there",
    )
    min_units: Count = Field(
        1,
        description="with fewer units than these the run ends, as without the section; of more than 12 units "
        "at stage 0 at most a few can be lost",
    )

    def check_with(self, config: Neighbours, report: Report) -> None:
        """See `Section.check_with`. Names what is not built."""
        if not self.enabled:
            return
        if self.copies != 1:
            report.complain("recovery.copies", self.copies, "must be 1: more copies are not built")
        if (
            config.outer is not None
        ):  # groups lose no steps: they are opened again only between themselves
            return
        zero = config.zero_optimization
        devices = (zero.offload_optimizer.device, zero.offload_param.device)
        sampling = config.data_efficiency.data_sampling
        refused = {
            "zero_optimization.offload_optimizer, offload_param": ("nvme", "nvme" in devices),
            "zero_optimization.offload_optimizer.super_offload": (
                True,
                zero.offload_optimizer.super_offload,
            ),
            "zero_optimization.zero_hpz_partition_size, zero_quantized_weights and _gradients": (
                "ZeRO++",
                zero.compresses,
            ),
            "zero_optimization.shared_parameters": (True, zero.shared_parameters),
            "optimizer.type": (config.optimizer_type, config.optimizer_type.startswith("OneBit")),
            "pipeline.stages with expert_parallel": (
                config.pipeline.stages,
                config.pipeline.stages > 1 and config.expert_parallel.enabled,
            ),
            "elasticity.enabled": (True, config.elasticity.enabled),
            "data_efficiency.data_sampling.dynamic_batching": (
                "a section",
                sampling.has_dynamic_batches,
            ),
            "managed_gradient_accumulation": (False, not config.managed_gradient_accumulation),
        }
        if (
            zero.stage == 0 or zero.mics_shard_size > 0
        ):  # units may be lost: others run their samples
            stages, pipeline = config.pipeline.stages, config.pipeline
            schedule, reduce = pipeline.schedule, pipeline.reduce
            refused |= {
                "pipeline.schedule": (schedule, stages > 1 and schedule not in SCHEDULES),
                "pipeline.reduce": (reduce, stages > 1 and reduce == "micro_batch"),
                "zero_optimization.stage of pipelines with mics_shard_size": (
                    zero.stage,
                    stages > 1 and zero.stage > 0,
                ),
                "expert_parallel.enabled": (True, config.expert_parallel.enabled),
                "data_efficiency.data_routing": (True, config.data_efficiency.drops_tokens),
                "quantize_training": ("a section", config.quantize_training.is_on),
                "progressive_layer_drop.enabled": (True, config.progressive_layer_drop.enabled),
            }
        for key, (value, is_refused) in refused.items():
            if is_refused:
                report.complain(
                    key,
                    value,
                    "does not work with recovery.enabled; change it, or set recovery.enabled to false",
                )

    def shard_ranks(self, zero: Any, mesh: Mesh) -> int:
        """So many data and sequence ranks share one copy of the states."""
        if zero.stage == 0:
            return 1
        return zero.mics_shard_size if zero.mics_shard_size > 0 else mesh.data * mesh.sequence

    def keeps_versions(self, zero: Any, mesh: Mesh) -> bool:
        """All ranks hold one copy of the states together, so each keeps versions of its part in memory."""
        from .units import data_ranks_of_unit

        return mesh.data // data_ranks_of_unit(mesh, self.shard_ranks(zero, mesh)) < 2

    def units(self, zero: Any, mesh: Mesh) -> list[tuple[int, ...]]:
        """The ranks of each unit. Where they keep versions a rank is one, together with its versions."""
        from .units import units_of

        if self.keeps_versions(zero, mesh):
            return [(rank,) for rank in range(mesh.size)]
        return units_of(mesh, self.shard_ranks(zero, mesh))

    def least_units(self, num_units: int) -> int:
        """The fewest units that go on, of `num_units` at the start: all of these numbers divide buffers."""
        least = num_units
        while least > self.min_units and _parts(least - 1, num_units) <= MOST_PARTS:
            least -= 1
        return least

    def num_parts(self, num_units: int) -> int:
        """Buffers have a multiple of so many elements, times their alignment, with `num_units` at the start."""
        return _parts(self.least_units(num_units), num_units)

    def complaints(self, zero: Any, mesh: Mesh) -> list[str]:
        """What is wrong with the ranks at the start."""
        if not self.enabled:
            return []
        if mesh.size == 1:
            return [
                "recovery.enabled = True: with one rank there is none that goes on; start at least 2 ranks, "
                "or set it to false"
            ]
        if self.keeps_versions(zero, mesh):
            return []
        num_units = len(self.units(zero, mesh))
        if num_units >= self.min_units:
            return []
        return [
            f"recovery.min_units = {shown(self.min_units)}: the run has {num_units} units (the smallest sets "
            "of ranks with the whole state); start more ranks, or lower it"
        ]


def _parts(least: int, most: int) -> int:
    return lcm(*range(least, most + 1))


__all__ = ["Recovery"]
