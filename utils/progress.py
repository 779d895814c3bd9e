"""A progress bar for work that takes long, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

DELAY_SECONDS = 2.0  # shorter work shows nothing
Item = TypeVar("Item")


@contextmanager
def progress(
    doing: str, total: int, unit: str = "B", *, is_shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes how much more is done. Shows a bar on a terminal, and elsewhere nothing.

    Args:
        unit: of `total`; "B" is bytes.
        is_shown: whether this rank shows it: rank 0 alone.
    """
    stream = sys.stderr
    if (
        not is_shown or stream is None or not stream.isatty()
    ):  # tqdm would start a thread all the same
        yield lambda count: None
        return
    from tqdm import tqdm

    name = unit if unit == "B" else f" {unit}"
    with tqdm(
        total=total,
        desc=doing,
        unit=name,
        unit_scale=unit == "B",
        delay=DELAY_SECONDS,
        leave=False,
        dynamic_ncols=True,
        file=stream,
    ) as bar:
        yield lambda count: bar.update(count) and None


def counted(
    items: Iterable[Item], doing: str, total: int, unit: str, *, is_shown: bool = True
) -> Iterator[Item]:
    """The items, each of which moves the bar of `progress`."""
    with progress(doing, total, unit, is_shown=is_shown) as advance:
        for item in items:
            yield item
            advance(1)
