"""What is cut out of a pruned layer and of the layers that are related to it, from names and sizes alone.

    rows      W1[keep, :], b1[keep]       of the pruned layer;   W2[:, keep]             of a related one
    heads     O[:, columns of keep]       of the pruned layer;   Q, K, V[rows of keep]   of related ones
    channels  K1[keep], b1[keep]          of the pruned layer;   K2[:, keep], or features of a BatchNorm2d

Weights are as nn.Linear and nn.Conv2d have them, outputs first. A layer that is related to pruned rows, and
has as many outputs but not as many inputs, is a factor of the pruned layer: rows of it are cut (W_up where
W_gate is pruned).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from ...utils.errors import UsageError
from .config import CUTTING, CompressionTraining
from .layers import KINDS, is_transposed, matching

RELATED = {"channel_pruning": (nn.Conv2d, nn.BatchNorm2d)}  # of other techniques: linear layers


@final
@dataclass(frozen=True)
class Cut:
    """Elements of one dimension of a layer's weight: 0 outputs, with the bias, 1 inputs.

    They are those that the mask of `technique` of the layer `source` keeps, each `size` times, `parts` times.
    """

    name: str
    layer: Any
    dim: int
    technique: str
    source: str
    size: int = 1
    parts: int = 1

    def keep(self, mask: Tensor) -> Tensor:
        """[outputs or inputs] bool, from the mask of the pruned layer."""
        return mask.flatten().bool().repeat_interleave(self.size).repeat(self.parts)


def cuts_of(model: nn.Module, section: CompressionTraining) -> list[Cut]:
    """What all techniques cut: for each pruned layer its own cut, then those of its related modules.

    Raises UsageError: a related module is missing, has another size, or would be cut twice.
    """
    found = [
        cut for name in section.enabled if name in CUTTING for cut in _cuts(model, name, section)
    ]
    owner: dict[tuple[str, int], Cut] = {}
    for cut in found:
        other = owner.setdefault((cut.name, cut.dim), cut)
        if other is not cut:
            raise UsageError(
                f"compression_training.{cut.technique}: {cut.name} would be cut for {other.source} and for "
                f"{cut.source}, whose masks differ; prune one of the two, and name the other one in its "
                "related_modules"
            )
    return found


def _cuts(model: nn.Module, technique: str, section: CompressionTraining) -> Iterator[Cut]:
    modules = dict(model.named_modules())
    for group in section.groups(technique):
        for pattern, related in zip(group.modules, group.related, strict=False):
            names = matching(model, pattern, KINDS[technique])
            if not related:
                continue
            others = {
                each: matching(model, each, RELATED.get(technique, (nn.Linear,)))
                for each in related
            }
            for each, found in others.items():
                if len(found) != len(names):
                    raise UsageError(
                        f'compression_training.{technique}: "{pattern}" matches {len(names)} layers and its '
                        f'related "{each}" {len(found)}: each layer needs one related module'
                    )
            for number, name in enumerate(names):
                layer: Any = modules[name]
                if technique == "head_pruning":
                    num_heads = section.head_pruning.shared_parameters.num_heads or 1
                    yield Cut(name, layer, 1, technique, name, _size(layer, 1) // num_heads)
                else:
                    yield Cut(name, layer, 0, technique, name)
                for found in others.values():
                    other = found[number]
                    if technique == "head_pruning":
                        yield _projection(other, modules[other], name, layer, num_heads)
                    else:
                        yield _follower(other, modules[other], technique, name, _size(layer, 0))


def _follower(name: str, layer: Any, technique: str, source: str, count: int) -> Cut:
    """The cut of a layer that reads `count` pruned rows or channels, or whose outputs multiply them."""
    inputs = _size(layer, 1)
    is_factor = technique == "row_pruning" and inputs != count == _size(layer, 0)
    if getattr(layer, "groups", 1) != 1 or (inputs != count and not is_factor):
        raise UsageError(
            f"compression_training.{technique}: {name} has {inputs} inputs, and {source} has {count} outputs; "
            "related_modules must name what reads these outputs, without groups"
        )
    return Cut(name, layer, 0 if is_factor else 1, technique, source)


def _projection(name: str, layer: Any, source: str, output: Any, num_heads: int) -> Cut:
    """The cut of a projection to the heads whose results `output` reads, or of three in one weight."""
    outputs, width = _size(layer, 0), _size(output, 1)
    if outputs not in (width, 3 * width):
        raise UsageError(
            f"compression_training.head_pruning: {name} has {outputs} outputs, and {source} has {width} "
            "inputs; heads are cut out of projections of equal widths, or of queries, keys and values in one "
            "weight. Leave related_modules out where heads share keys: then pruned heads are zero"
        )
    return Cut(name, layer, 0, "head_pruning", source, width // num_heads, outputs // width)


def _size(layer: Any, dim: int) -> int:
    """Outputs (0) or inputs (1) of a layer; features of a BatchNorm2d."""
    if isinstance(layer, nn.BatchNorm2d):
        return layer.num_features
    return int(layer.weight.shape[1 - dim if is_transposed(layer) else dim])


__all__ = ["Cut", "cuts_of"]
