"""Checks of the offload keys that need more than one of them."""

from __future__ import annotations

from typing import Any

from ...utils.schema.keys import Report
from ...zero.config import ZeroConfig
from .optimizer import WHOLE_TENSOR


def check_guesses(optimizer: Any, zero: ZeroConfig, report: Report) -> None:
    """Updates during backward need a home on the host, and an optimizer that works element by element."""
    offload, key = zero.offload_optimizer, "zero_optimization.offload_optimizer.super_offload"
    if not offload.super_offload:
        return
    if offload.device == "none":
        report.complain(
            key, True, 'it needs updates on the host: set offload_optimizer.device to "cpu"'
        )
    if optimizer is not None and optimizer.type in WHOLE_TENSOR:
        report.complain(
            key,
            True,
            f"{optimizer.type} uses norms or products of whole tensors, which are known after backward only: "
            "set it to false, or choose an optimizer such as AdamW",
        )


def without_idle_offload(zero: ZeroConfig, report: Report) -> ZeroConfig:
    """`zero` with the parameters on the device below stage 3, where they are not sharded."""
    section = zero.offload_param
    if section.device == "none" or zero.stage == 3:
        return zero
    report.without_effect.append(
        (
            "zero_optimization.offload_param.device",
            f"parameters are sharded at stage 3 only, and the stage is {zero.stage}: they stay on the device "
            "(offload_optimizer works at every stage)",
        )
    )
    off = section.model_copy(update={"device": "none"})
    return zero.model_copy(update={"offload_param": off, "cpu_offload_param": False})


def check_old_names(zero: ZeroConfig, report: Report) -> None:
    """DeepSpeed's old names must not contradict the sections; a section without a device does nothing."""
    for old, name in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
    ):
        section = getattr(zero, name)
        given = section.model_fields_set
        if getattr(zero, old) and "device" in given and section.device != "cpu":
            report.complain(
                f"zero_optimization.{old}",
                True,
                f'it means {name}.device = "cpu", and {name}.device is "{section.device}": remove {old}',
            )
        if given and "device" not in given and not getattr(zero, old):
            report.notes.append(
                f'zero_optimization.{name} has no device, so nothing is offloaded: set it to "cpu" or "nvme"'
            )


def check_paths(zero: ZeroConfig, report: Report) -> None:
    """A file needs a folder, and paths must be paths."""
    offload = zero.offload_optimizer
    if offload.device == "nvme" and offload.super_offload:
        report.notes.append(
            'offload_optimizer.super_offload has no effect with device "nvme": these updates wait for the norm'
        )
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section.nvme_path is not None and "\0" in section.nvme_path:
            key = f"zero_optimization.{name}.nvme_path"
            report.complain(key, section.nvme_path, "a path has no null character")
        if section.device == "nvme" and not section.nvme_path:
            report.complain(
                f"zero_optimization.{name}.nvme_path",
                section.nvme_path,
                'device = "nvme" needs a folder on a local disk, such as "/local_nvme"; set nvme_path, or the '
                'device to "cpu"',
            )
