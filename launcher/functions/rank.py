"""A rank of `xds.launch`: calls the function, and writes what it returns."""

from __future__ import annotations

import os
from pathlib import Path

from ...engine.integrations.optional import need
from ...utils.errors import UsageError
from .launch import CALL, read_call


def main(script: str) -> None:
    """Call the function in the folder of `script`, the rank's `__main__`."""
    folder = Path(script).parent
    function, args, kwargs = read_call((folder / CALL).read_bytes())
    result = function(*args, **kwargs)
    rank = os.environ["RANK"]
    try:
        pickled = need("cloudpickle", "xds.launch", "notebook").dumps(result)
    except Exception as error:
        name = getattr(function, "__qualname__", "function")
        raise UsageError(
            f"xds.launch({name}): rank {rank} returned {type(result).__name__}, which cannot be sent back: "
            f"{error}; return numbers, tensors or text, or save to a file"
        ) from error
    part = folder / f"rank{rank}.part"
    part.write_bytes(pickled)
    part.replace(folder / f"rank{rank}.pickle")


__all__ = ["main"]
