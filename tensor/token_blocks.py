"""The blocks that have the tokens of their rank between layers: those with the word `sequence_parallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from ..ops.comm.collectives import Collectives
from ..utils.errors import UsageError
from .layers import Region
from .same_batches import has_dropout
from .styles import ParallelStyle, StyleName
from .tokens import Tokens, cut_blocks, with_activations

Blocks = Sequence[tuple[str, nn.Module]]


@final
@dataclass
class TokenBlocks:
    """
    names: of the blocks. tokens: their messages; None: there are no such blocks.
    gathered: names of modules in them whose input is gathered.
    """

    names: frozenset[str] = frozenset()
    tokens: Tokens | None = None
    hooks: list[Any] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)

    def of(self, name: str) -> Tokens | None:
        """The messages for the module `name`; None: it is not inside of such a block."""
        parts = name.split(".")
        tops = {".".join(parts[: end + 1]) for end in range(len(parts))}
        return self.tokens if tops & self.names else None

    def has_inside(self, name: str) -> bool:
        """A module is inside of such a block, and not the block itself."""
        return self.of(name) is not None and name not in self.names

    def gather_input(self, name: str, module: nn.Module, region: Region) -> None:
        """Gather all tokens of the input of a module inside of such a block. region: of its layers.

        Attention counts the tokens of its input. So its input is gathered, and not those of its layers.
        """

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_activations(name, args, kwargs, region.gather)

        if name not in self.gathered:
            self.gathered.add(name)
            self.hooks.append(module.register_forward_pre_hook(gather, with_kwargs=True))

    def undo(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def cut_tokens(
    styles: Mapping[str, ParallelStyle],
    runs: Sequence[Blocks],
    group: Collectives,
    partial: set[int],
) -> TokenBlocks:
    """Cut the activations of the blocks that have a module with the word TOKENS. Others stay as they are.

    partial: gets id of every parameter of these blocks, whose gradients are sums over own tokens.

    Raises:
        UsageError: such a block has dropout.
    """
    marked = [name for name, style in styles.items() if style.name is StyleName.TOKENS]
    names: set[str] = set()
    found = TokenBlocks(tokens=Tokens(group))
    assert found.tokens is not None
    for run in runs:
        together: list[tuple[str, nn.Module]] = []
        for name, block in run:
            if not any(one.startswith(f"{name}.") for one in marked):
                together = _end(together, found)
                continue
            if any(has_dropout(module) for module in block.modules()):
                raise UsageError(
                    f'tensor_parallel.plan: "sequence_parallel" in {name}, which has dropout: ranks would have '
                    "to draw other numbers for their tokens; set dropout to 0, or take the word out of the plan"
                )
            names.add(name)
            partial.update(id(param) for param in block.parameters())
            together.append((name, block))
        _end(together, found)
    found.names = frozenset(names)
    return found if names else TokenBlocks()


def _end(together: list[tuple[str, nn.Module]], found: TokenBlocks) -> list[tuple[str, nn.Module]]:
    if together:
        assert found.tokens is not None
        found.hooks += cut_blocks(together, found.tokens)
    return []


__all__ = ["TokenBlocks", "cut_tokens"]
