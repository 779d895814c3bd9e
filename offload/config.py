"""The offload keys of the config: where optimizer states and parameters are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from ..utils.schema.keys import Detail, Entry, Group, NoEffect, details
from ..utils.schema.rules import FLAG, NULL, NUMBER, TEXT, Rule, either, number, one_of, size, whole
from ..utils.schema.section import Section

_OVERLAPS = "reads and writes always overlap with the update"


_SIZES = "buffers have the size of the largest unit, computed"


def _read_ratio(value: object) -> object:
    if isinstance(value, str) and value.casefold() == "auto":
        return "auto"
    try:
        return _SHARE.read(value)
    except ValueError:
        raise ValueError(f"must be {RATIO.need}") from None


_SHARE = number(0, 1)
RATIO = Rule(f'{_SHARE.need}, or "auto"', _read_ratio, takes_auto=True)
Flag = Annotated[bool, FLAG]
Device = Annotated[Literal["none", "cpu", "nvme"], one_of("none", "cpu", "nvme")]
Folder = Annotated[str | None, either(TEXT, NULL)]
_PATH = "a folder on a local disk; each rank has a file there without a name, which ends with the process"


@final
class OffloadParam(Section):
    """Where the shards of the parameters are stored. For stage 3, on one rank as well."""

    others: ClassVar[Mapping[str, Entry]] = {
        "buffer_count": NoEffect(whole(0), _SIZES),
        "buffer_size": NoEffect(size(), _SIZES),
    }

    device: Device = Field(
        "none",
        description='"cpu" stores parameters on the host; a unit is on the device while it is in use; "nvme" '
        "stores them in a file",
    )
    nvme_path: Folder = Field(None, description='for "nvme": ' + _PATH)
    max_in_cpu: Annotated[int, size()] = Field(
        1_000_000_000, description='for "nvme": elements of each rank that stay in host memory'
    )
    pin_memory: Flag = Field(True, description="host memory for parameters is pinned")


@final
class OffloadOptimizer(Section):
    """Where the optimizer state and the master weights are stored, and where the optimizer runs."""

    others: ClassVar[Mapping[str, Entry]] = {
        "buffer_count": NoEffect(whole(0), _SIZES),
        "pipeline_read": NoEffect(FLAG, _OVERLAPS),
        "pipeline_write": NoEffect(FLAG, _OVERLAPS),
        "fast_init": NoEffect(FLAG, "states are never written before the first step"),
    }

    device: Device = Field(
        "none",
        description='"cpu" stores optimizer states on the host, and the optimizer runs there; "nvme" stores '
        "them in a file, and only those that are updated are in memory",
    )
    nvme_path: Folder = Field(None, description='for "nvme": ' + _PATH)
    ratio: Annotated[float | Literal["auto"], RATIO] = Field(
        1.0,
        description="share of the optimizer states on the host; the rest stays on the device. "
        '"auto": all are on the host for two updates, then as many as fit move to the device',
    )
    cpuadam_cores_perc: Annotated[float | None, either(number(0.01, 1), NULL)] = Field(
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
    {
        **details(NUMBER, "topk_ratio", "auto_ratio", "pt_reserved_cores_perc"),
        "select_strategy": Detail(one_of("auto", "step", "epoch")),
        **details(whole(1), "select_interval", "update_interval", "steps_per_epoch"),
        **details(FLAG, "overlap_step", "offload"),
        "full_warm_up_rounds": Detail(whole(0)),
    },
    "updates the largest gradients on the device and the rest later on the host",
    present="ZenFlow is not supported: it changes the numbers; remove the section",
)

ZERO_KEYS: dict[str, Entry] = {
    "zenflow": ZENFLOW,
}

_THREADS = "queue_depth sets the number of threads"
_BY_THREADS = "each block is one system call of a thread"


def _read_block(value: object) -> object:
    found = whole(PAGE_BYTES).read(value)
    if found % PAGE_BYTES:
        more = -(-found // PAGE_BYTES) * PAGE_BYTES
        raise ValueError(f"must be a multiple of {PAGE_BYTES} bytes, such as {more}")
    return found


PAGE_BYTES = 4096  # of memory, offset and length, for direct I/O
BLOCK = Rule(f"a number of bytes, a multiple of {PAGE_BYTES}", _read_block)


@final
class Aio(Section):
    """How files on NVMe are read and written. For device = "nvme"."""

    others: ClassVar[Mapping[str, Entry]] = {
        "intra_op_parallelism": NoEffect(whole(1), _THREADS),
        "thread_count": NoEffect(whole(1), _THREADS),
        "single_submit": NoEffect(FLAG, _BY_THREADS),
        "overlap_events": NoEffect(FLAG, _BY_THREADS),
        "use_gds": NoEffect(FLAG, "states are updated on the host, so they never go to the device"),
    }

    block_size: Annotated[int, BLOCK] = Field(
        1 << 20, description="bytes of one system call, a multiple of 4096"
    )
    queue_depth: Annotated[int, whole(1, 1024)] = Field(
        8, description="blocks that are read and written at the same time, each by a thread"
    )


TOP_LEVEL_KEYS: dict[str, Entry] = {
    "zero_force_ds_cpu_optimizer": NoEffect(
        FLAG, "any optimizer may be offloaded; those of xds overlap with the device", same=(True,)
    ),
}
