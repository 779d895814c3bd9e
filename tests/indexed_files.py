"""The format of indexed files as its description says, written independently of the product."""

import struct

HEADER = struct.Struct("<9sQBQQ")
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 6, "u4": 7, "u8": 8}


def index_of(code, sizes, itemsize, documents, positions=None):
    """The index of rows of these sizes, one after another or at `positions`."""
    if positions is None:
        positions = [sum(sizes[:at]) * itemsize for at in range(len(sizes))]
    head = HEADER.pack(b"MMIDIDX\0\0", 1, code, len(sizes), len(documents))
    numbers = f"<{len(sizes)}i{len(positions)}q{len(documents)}q"
    return head + struct.pack(numbers, *sizes, *positions, *documents)
