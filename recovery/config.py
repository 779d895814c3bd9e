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
    @property
    def dataloader_num_workers(self) -> int: ...


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
        description="where ranks hold one copy of the states alone (stages 1 to 3 without mics_shard_size), 1 "
        "keeps the last two steps in the shared memory of this host, and in that of the next one if there are "
        "several; only 1 is built",
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
        has_host = zero.offload_optimizer.device != "none" or zero.offload_param.device != "none"
        stages, cut_ranks = config.pipeline.stages, config.model_ranks // config.pipeline.stages
        packs, sampling = config.data_packing.tokens, config.data_efficiency.data_sampling
        refused = {
            "tensor ranks x sequence ranks": (cut_ranks, cut_ranks > 1),
            "pipeline.schedule": (
                config.pipeline.schedule,
                stages > 1 and config.pipeline.schedule not in SCHEDULES,
            ),
            "pipeline.reduce": (
                config.pipeline.reduce,
                stages > 1 and config.pipeline.reduce == "micro_batch",
            ),
            "zero_optimization.stage of pipelines": (zero.stage, stages > 1 and zero.stage > 0),
            "zero_optimization.offload_optimizer, offload_param": ("a host", has_host),
            "zero_optimization.zero_hpz_partition_size, zero_quantized_weights and _gradients": (
                "ZeRO++",
                zero.compresses,
            ),
            "zero_optimization.shared_parameters": (True, zero.shared_parameters),
            "optimizer.type": (config.optimizer_type, config.optimizer_type.startswith("OneBit")),
            "expert_parallel.enabled": (True, config.expert_parallel.enabled),
            "elasticity.enabled": (True, config.elasticity.enabled),
            "data_packing.tokens": (packs, bool(packs)),
            "data_efficiency.data_sampling": (
                "a curriculum or batches of unequal sizes",
                sampling.has_curriculum or sampling.has_dynamic_batches,
            ),
            "data_efficiency.data_routing": (True, config.data_efficiency.drops_tokens),
            "compression_training": ("a section", config.compression_training.enabled),
            "quantize_training": ("a section", config.quantize_training.is_on),
            "progressive_layer_drop.enabled": (True, config.progressive_layer_drop.enabled),
            "curriculum_learning.enabled": (True, config.curriculum_learning.enabled),
            "checkpoint.async_save": (True, config.checkpoint.async_save),
            "managed_gradient_accumulation": (False, not config.managed_gradient_accumulation),
            "dataloader_num_workers": (
                config.dataloader_num_workers,
                config.dataloader_num_workers > 0,
            ),
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

    def keeps_versions(self, zero: Any) -> bool:
        """Ranks hold one copy of the states alone, so each keeps versions of its part in shared memory."""
        return self.enabled and zero.stage > 0 and zero.mics_shard_size <= 0

    def units(self, zero: Any, mesh: Mesh) -> list[tuple[int, ...]]:
        """The ranks of each unit. Where they keep versions a rank is one, together with its versions."""
        from .units import units_of

        if self.keeps_versions(zero):
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
        num_units, least = len(self.units(zero, mesh)), max(2, self.min_units)
        if num_units >= least:
            return []
        if num_units == 1 and mesh.size > 1 and zero.stage:
            return [
                f"zero_optimization.mics_shard_size = {zero.mics_shard_size} with recovery.enabled: all "
                f"{mesh.size} ranks are one shard group; leave mics_shard_size out, so that each rank keeps "
                "copies of its states, or set recovery.enabled to false"
            ]
        return [
            f"recovery.min_units = {shown(self.min_units)}: the run has {num_units} units (the smallest sets "
            f"of ranks with the whole state), and recovery.enabled needs at least {least}; start more ranks, "
            "or set recovery.enabled to false"
        ]


def _parts(least: int, most: int) -> int:
    return lcm(*range(least, most + 1))


__all__ = ["Recovery"]
