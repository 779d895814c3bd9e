"""What one rank refuses, all refuse: none waits for a rank that has raised an error.

    with agreeing(world, "xds.initialize"):
        cut(model)      rank 0: UsageError: the block has no MLP
                        rank 1: UsageError: xds.initialize failed on rank 0: the block has no MLP

Ranks have different parts of a model, so a check may fail on some of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...utils.errors import UsageError, XdsError
from ..flat import bytes_to
from .collectives import Collectives

TEXT_BYTES = 512


@contextmanager
def agreeing(collectives: Collectives, doing: str) -> Iterator[None]:
    """Inside, a rank may raise an error, and nothing is sent. At the end, if one has, all raise. A collective.

    Sends 512 bytes to each rank. A rank that has raised an error raises that one.

    Raises:
        UsageError: another rank has raised an error; it says which rank, and the error.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        agree(collectives, "" if failure is None else _text(failure), UsageError, doing)
    except UsageError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, XdsError) else f"{type(error).__name__}: {error}"


def agree(collectives: Collectives, text: str, kind: type[XdsError], doing: str) -> None:
    """Raise `kind` on every rank if one has a `text`; "" is none. Sends 512 bytes to each rank."""
    # a character that is cut in two is left out
    own = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    sent = bytes_to(collectives.device, own)
    table = collectives.gather_small(sent, what=f"whether {doing} works").view(-1, TEXT_BYTES).cpu()
    if not table[:, 0].any():
        return
    failed = [rank for rank, row in enumerate(table) if row[0]]
    first = bytes(table[failed[0]].tolist()).rstrip(b"\0").decode(errors="ignore")
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise kind(f"{doing} failed on rank {failed[0]}{others}: {text or first}")


__all__ = ["agree", "agreeing"]
