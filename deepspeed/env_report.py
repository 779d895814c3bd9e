"""`deepspeed.env_report`: prints which of DeepSpeed's ops work here, and the versions of torch and xds."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Any

import torch

from .accelerator import get_accelerator
from .git_version_info import git_branch, git_hash, version
from .missing import placeholder

GREEN, RED, YELLOW, END = "\033[92m", "\033[91m", "\033[93m", "\033[0m"
SUCCESS = f"{GREEN} [SUCCESS] {END}"
OKAY = okay = f"{GREEN}[OKAY]{END}"
WARNING = warning = f"{YELLOW}[WARNING]{END}"
FAIL = f"{RED}[FAIL]{END}"
INFO = "[INFO]"
MIN_SHM_BYTES = 512 * 2**20  # of /dev/shm, which NCCL and data loaders use
WIDTH = 34


def _line(name: str, value: object) -> None:
    print(f"{name} {'.' * max(1, WIDTH - len(name))} {value}")


def op_report(verbose: bool = True) -> None:
    """Print each op of DeepSpeed, and whether xds has it. xds builds its own ops on first use."""
    from .ops.op_builder.builder import ALL_OPS

    print("DeepSpeed C++/CUDA extension op report")
    for name, builder in ALL_OPS.items():
        works = builder.is_compatible()
        _line(name, OKAY if works else f"{YELLOW}[NO]{END}")
        if verbose and not works:
            print(f"  {builder.__doc__}")


def human_readable_size(size: float) -> str:
    """Bytes in the greatest unit of which there is at least one: "1.50 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"


def get_shm_size() -> tuple[str, list[str]]:
    """The size of /dev/shm, and warnings about it."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return "UNKNOWN", []
    size = found.f_frsize * found.f_blocks
    text = f"{WARNING} /dev/shm is small: in docker set --shm-size to 1gb or more"
    return human_readable_size(size), [text] if size < MIN_SHM_BYTES else []


def nvcc_version() -> str:
    """The version of CUDA's compiler, or why there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        return f"{FAIL} there is no CUDA_HOME"
    try:
        text = subprocess.check_output([f"{CUDA_HOME}/bin/nvcc", "-V"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return f"{FAIL} nvcc is missing in {CUDA_HOME}"
    return text.partition("release ")[2].partition(",")[0]


def debug_report() -> None:
    """Print versions and places."""
    from .. import __version__

    size, warnings = get_shm_size()
    facts: dict[str, Any] = {
        "torch install path": list(torch.__path__),
        "torch version": torch.__version__,
        "deepspeed install path": [os.path.dirname(__file__)],
        "deepspeed info": f"{version}, {git_hash}, {git_branch}; xds {__version__} stands in for it",
    }
    if get_accelerator().device_name() == "cuda":
        facts["torch cuda version"] = torch.version.cuda
        facts["torch hip version"] = torch.version.hip
        facts["nvcc version"] = None if torch.version.hip else nvcc_version()
    facts["shared memory (/dev/shm) size"] = size
    print("DeepSpeed general environment info:")
    for name, value in facts.items():
        _line(name, value)
    for text in warnings:
        print(text)


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hide_operator_status", action="store_true", help="without the ops")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="without what ops lack"
    )
    return parser.parse_args()


def cli_main() -> None:
    """`python -m deepspeed.env_report`."""
    main(**vars(parse_arguments()))


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)


if __name__ == "__main__":
    cli_main()
