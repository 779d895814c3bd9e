"""Host memory that is freed and soon needed again: whether it stays in the process or goes back.

At stage 3 on a CPU every unit's buffer is freed and allocated twice a step. glibc by default hands large
blocks back to the kernel, and getting one back costs a page fault for every 4 KiB: 10,000 faults a step for
an 11M-parameter model on 2 ranks. Blocks of more than 32 MiB are beyond glibc's limit; keep units smaller.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD = -1  # malloc.h: keep free memory at the end of the heap up to this size
M_MMAP_THRESHOLD = -3  # malloc.h: take blocks of at least this size straight from the kernel
LARGEST_HEAP_BLOCK_BYTES = 32 << 20  # glibc accepts no more
KEPT_BYTES = 1 << 30


RETURNED_BLOCK_BYTES = 1 << 19  # while a model is built, what is larger goes back to the kernel


def keep_freed_blocks() -> bool:
    """Let this process keep freed host blocks of up to 32 MiB. False: not glibc, or the user's own choice.

    Holds for the whole process; MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ in the environment win.
    """
    return _set(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK_BYTES) and _set(M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_blocks() -> bool:
    """The opposite, for a time in which large blocks come and go between small ones that stay.

    In one heap the ones that stay would pin the holes that the others leave: building 100M parameters in
    slices took 2.4 times the slices. The answer is as above.
    """
    return _set(M_MMAP_THRESHOLD, RETURNED_BLOCK_BYTES)


def _set(parameter: int, value_bytes: int) -> bool:
    if any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value_bytes))
