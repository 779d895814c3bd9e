"""The offload keys of the config: where a shard is stored. Only the device is supported."""

from __future__ import annotations

from ..utils.schema.keys import Detail, Entry, Group, NoEffect, Refused, details
from ..utils.schema.rules import FLAG, NUMBER, TEXT, one_of, size, whole

_NOT_YET = "offloading is not supported yet; {} (a higher stage or more ranks also save memory)"
_DEVICE = Refused(
    one_of("none", "cpu", "nvme"), _NOT_YET.format('set it to "none"'), harmless=("none",)
)
_FLAG = Refused(FLAG, _NOT_YET.format("set it to false"), harmless=(False,))

OFFLOAD_PARAM = Group(
    {
        "device": _DEVICE,
        "nvme_path": Detail(TEXT),
        **details(whole(0), "buffer_count"),
        **details(size(), "buffer_size", "max_in_cpu"),
        "pin_memory": Detail(FLAG),
    },
    "where the parameters of stage 3 are stored",
)

OFFLOAD_OPTIMIZER = Group(
    {
        "device": _DEVICE,
        "nvme_path": Detail(TEXT),
        "buffer_count": Detail(whole(0)),
        **details(FLAG, "pin_memory", "pipeline_read", "pipeline_write", "fast_init"),
        **details(NUMBER, "ratio", "cpuadam_cores_perc"),
        "super_offload": _FLAG,
    },
    "where the optimizer state is stored",
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
    present="ZenFlow is not supported yet; remove the section",
)

ZERO_KEYS: dict[str, Entry] = {
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "cpu_offload": _FLAG,
    "cpu_offload_param": _FLAG,
    "cpu_offload_params": _FLAG,
    "cpu_offload_use_pin_memory": Detail(FLAG),
    "zenflow": ZENFLOW,
}

_AIO = "only offloading to NVMe would use it, and that is not supported yet"

AIO = Group(
    {
        **{
            name: NoEffect(whole(1), _AIO)
            for name in ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")
        },
        **{name: NoEffect(FLAG, _AIO) for name in ("single_submit", "overlap_events", "use_gds")},
    },
    "how NVMe files are read and written",
)

TOP_LEVEL_KEYS: dict[str, Entry] = {
    "aio": AIO,
    "zero_force_ds_cpu_optimizer": NoEffect(
        FLAG, "only offloading to the CPU would use it, and that is not supported yet", same=(True,)
    ),
}
