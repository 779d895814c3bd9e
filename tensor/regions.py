"""What has to be proven of a plan: one block of each kind, and what is cut outside of blocks. Pure arithmetic.

layers between which activations are cut                 proven as
blocks.0.attn.q, blocks.0.attn.o                         blocks.0
projector.up (columns), projector.down (rows)            projector
inp (columns), out.last (rows)                           the module around both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .styles import BY_HEADS, CUTS_COLUMNS, CUTS_ROWS, ParallelStyle, StyleName


def layers_in(block: str, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The layers in the module `block`, by their names in it. A layer is not in itself."""
    start = f"{block}." if block else ""
    return {name[len(start) :]: style for name, style in styles.items() if name.startswith(start)}


def regions(styles: Mapping[str, ParallelStyle], blocks: Sequence[str]) -> list[str]:
    """The smallest modules around what is cut outside of `blocks`: their inputs and outputs are whole.

    Layers whose inputs and outputs are whole need no module around them, such as "colwise_gather_output".

    >>> regions({"up": ParallelStyle(StyleName.COLWISE), "a.down": ParallelStyle(StyleName.ROWWISE)}, [])
    ['']
    """
    inside = tuple(f"{block}." for block in blocks)
    parents: dict[str, set[StyleName]] = {}
    for name, style in styles.items():
        if style.name in BY_HEADS | {StyleName.PARTIAL} and not name.startswith(inside):
            parents.setdefault(name.rpartition(".")[0], set()).add(style.name)
    around = [
        parent for parent, names in parents.items() if names & CUTS_COLUMNS and names & CUTS_ROWS
    ]
    rest = [parent for parent in parents if parent not in around]
    if rest:
        around.append(_common(rest))
    outermost = [parent for parent in around if not any(_is_in(parent, other) for other in around)]
    return sorted(set(outermost))


def _common(names: Sequence[str]) -> str:
    """The innermost module that contains all of `names`, or is all of them."""
    parts = [name.split(".") if name else [] for name in names]
    length = 0
    while all(len(words) > length and words[length] == parts[0][length] for words in parts):
        length += 1
    return ".".join(parts[0][:length])


def _is_in(name: str, other: str) -> bool:
    """`name` is a module inside of `other`."""
    return name != other and (not other or name.startswith(f"{other}."))


__all__ = ["layers_in", "regions"]
