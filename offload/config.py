"""The offload keys of the config: where optimizer states and parameters are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from ..utils.schema.section import Entry, Group, NoEffect, Section, details
from ..utils.schema.values import (
    ANY_CASE,
    WHOLE,
    Count,
    Elements,
    Flag,
    Natural,
    Number,
    Share,
    needs,
)

_OVERLAPS = "reads and writes always overlap with the update"
_SIZES = "buffers have the size of the largest unit, computed"
Device = Annotated[Literal["none", "cpu", "nvme"], ANY_CASE]
_PATH = "a folder on a local disk; each rank has a file there without a name, which ends with the process"


@final
class OffloadParam(Section):
    """Where the shards of the parameters are stored. For stage 3, on one rank as well."""

    others: ClassVar[Mapping[str, Entry]] = {
        "buffer_count": NoEffect(Natural, _SIZES),
        "buffer_size": NoEffect(Elements, _SIZES),
    }

    device: Device = Field(
        "none",
        description='"cpu" stores parameters on the host; a unit is on the device while it is in use; "nvme" '
        "stores them in a file",
    )
    nvme_path: str | None = Field(None, description='for "nvme": ' + _PATH)
    max_in_cpu: Elements = Field(
        1_000_000_000, description='for "nvme": elements of each rank that stay in host memory'
    )
    pin_memory: Flag = Field(True, description="host memory for parameters is pinned")


@final
class OffloadOptimizer(Section):
    """Where the optimizer state and the master weights are stored, and where the optimizer runs."""

    others: ClassVar[Mapping[str, Entry]] = {
        "buffer_count": NoEffect(Natural, _SIZES),
        "pipeline_read": NoEffect(Flag, _OVERLAPS),
        "pipeline_write": NoEffect(Flag, _OVERLAPS),
        "fast_init": NoEffect(Flag, "states are never written before the first step"),
    }

    own_auto: ClassVar[frozenset[str]] = frozenset({"ratio"})

    device: Device = Field(
        "none",
        description='"cpu" stores optimizer states on the host, and the optimizer runs there; "nvme" stores '
        "them in a file, and only those that are updated are in memory",
    )
    nvme_path: str | None = Field(None, description='for "nvme": ' + _PATH)
    ratio: Share | Annotated[Literal["auto"], ANY_CASE] = Field(
        1.0,
        description="share of the optimizer states on the host; the rest stays on the device. "
        '"auto": all are on the host for two updates, then as many as fit move to the device',
    )
    cpuadam_cores_perc: Annotated[float, Field(ge=0.01, le=1)] | None = Field(
        None,
        description="share of this rank's cores that the update on the host uses; null: all but two, and at "
        "least 80 %. Ranks of one machine divide its cores, unless OMP_NUM_THREADS or an affinity is set",
    )
    pin_memory: Flag = Field(True, description="host memory for copies is pinned")
    overlap_step: Flag = Field(
        False,
        description="stages 0 to 2: step() does not wait for updates on the host, which run under the next "
        "forward. Until its unit runs, a parameter reads as NaN in the script. Stage 3 always does this for "
        "parameters that are dropped after use",
    )
    super_offload: Flag = Field(
        False,
        description="updates on the host run during backward already, as if the step were neither clipped nor "
        "skipped, and are undone where it is. Old values take as much host memory as the updates that backward "
        "has time for, at most half of what is free",
    )


ZENFLOW = Group(
    "updates the largest gradients on the device and the rest later on the host",
    details(Number, "topk_ratio auto_ratio pt_reserved_cores_perc"),
    details(Annotated[Literal["auto", "step", "epoch"], ANY_CASE], "select_strategy"),
    details(Count, "select_interval update_interval steps_per_epoch"),
    details(Flag, "overlap_step offload"),
    details(Natural, "full_warm_up_rounds"),
    present="ZenFlow is not supported: it changes the numbers; remove the section",
)

_THREADS = "queue_depth sets the number of threads"
_BY_THREADS = "each block is one system call of a thread"
PAGE_BYTES = 4096  # of memory, offset and length, for direct I/O
_BLOCK = f"a number of bytes, a multiple of {PAGE_BYTES}"


@final
class Aio(Section):
    """How files on NVMe are read and written. For device = "nvme"."""

    others: ClassVar[Mapping[str, Entry]] = {
        "intra_op_parallelism": NoEffect(Count, _THREADS),
        "thread_count": NoEffect(Count, _THREADS),
        "single_submit": NoEffect(Flag, _BY_THREADS),
        "overlap_events": NoEffect(Flag, _BY_THREADS),
        "use_gds": NoEffect(Flag, "states are updated on the host, so they never go to the device"),
    }

    block_size: Annotated[
        int, Field(ge=PAGE_BYTES, multiple_of=PAGE_BYTES), needs(_BLOCK), WHOLE
    ] = Field(1 << 20, description="bytes of one system call, a multiple of 4096")
    queue_depth: Annotated[int, Field(ge=1, le=1024), WHOLE] = Field(
        8, description="blocks that are read and written at the same time, each by a thread"
    )


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "zero_force_ds_cpu_optimizer": NoEffect(
        Flag, "any optimizer may be offloaded; those of xds overlap with the device", same=(True,)
    ),
}
