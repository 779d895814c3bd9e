"""Reads DeepSpeed's partition_config: regular expressions of parameter names -> how each layer is cut.

{"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"}             rowwise
{"patterns": [".*\\\\.[qkv]_proj\\\\.weight$"], "partition_type": "column"}      colwise
{"patterns": [...], "partition_type": "column", "shape": [2, -1]}            packed, two equal parts
{"patterns": [...], "partition_type": "column", "shape": [[64, 16, 16], -1]} packed, parts of these sizes
{"patterns": [...], "partition_type": "skip"}                                whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..utils.errors import UsageError
from ..utils.patterns import check_expression, matching
from ..utils.quoting import quoted
from .plan import ParallelPlan, check_module
from .styles import ParallelStyle, StyleName, length_of

PATH = "tensor_parallel.partition_config"
KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output")
WORDS = {"column": StyleName.COLWISE, "row": StyleName.ROWWISE, "skip": StyleName.WHOLE}


class _Spec(NamedTuple):
    """One entry of layer_specs. path: its place in the config."""

    path: str
    patterns: tuple[str, ...]
    style_name: StyleName
    shape: Any

    def matched(self, names: Sequence[str]) -> set[str]:
        """Those that one of the patterns matches, with or without ".weight" at their end."""
        layers: set[str] = set()
        ends = [end for name in names for end in (f"{name}.weight", name)]
        for pattern in self.patterns:
            try:
                hits = matching(pattern, ends)
            except ValueError as error:
                raise UsageError(f"{self.path}.patterns: {quoted(pattern)} {error}") from None
            layers.update(names[number // 2] for number, is_hit in enumerate(hits) if is_hit)
        return layers


def has_specs(config: Mapping[str, Any] | None) -> bool:
    """The config lists layers, which come before every other plan."""
    return bool(config and config.get("layer_specs"))


def keeps_own_plan(config: Mapping[str, Any] | None) -> bool:
    """Layers that no pattern matches are cut as the model's own plan says."""
    return bool(config and config.get("use_default_specs", True))


def read_specs(
    config: Mapping[str, Any], own: ParallelPlan, model: nn.Module, *, is_part: bool = False
) -> ParallelPlan:
    """Module name -> how it is cut.

    Args:
        own: what holds for the layers that no pattern matches.
        is_part: the model has the layers of one pipeline stage only, so a pattern may match nothing.

    Raises:
        UsageError: an unknown key or type, a pattern that matches no layer, or a shape that does not fit.
    """
    unknown = [key for key in config if key not in ("use_default_specs", "layer_specs")]
    if unknown:
        raise UsageError(f"{PATH}.{unknown[0]}: unknown key; remove it")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    specs = [
        _spec(entry, f"{PATH}.layer_specs[{i}]", kind)
        for i, entry in enumerate(config["layer_specs"])
    ]
    asked = [spec for spec in specs if spec is not None]
    plan: ParallelPlan = dict(own)
    modules = {
        name: module
        for name, module in model.named_modules()
        if module._parameters.get("weight") is not None
    }
    matched = [spec.matched(list(modules)) for spec in asked]
    for name, module in modules.items():
        first = next(
            (spec for spec, hits in zip(asked, matched, strict=True) if name in hits), None
        )
        if first is not None:
            plan[name] = _style(first, name, module)
    unused = [spec for spec, hits in zip(asked, matched, strict=True) if not hits]
    if unused and not is_part:
        raise UsageError(
            f"{unused[0].path}.patterns = {list(unused[0].patterns)}: they match no weight of "
            f"{type(model).__name__}; correct them, or remove the entry"
        )
    return {name: style for name, style in plan.items() if style.name is not StyleName.WHOLE}


def _spec(entry: Any, path: str, kind: str | None) -> _Spec | None:
    """None: the entry is for models of another type."""
    if not isinstance(entry, Mapping) or not entry.get("patterns"):
        raise UsageError(f'{path} must be an object with patterns, such as [".*o_proj.weight$"]')
    for key in entry:
        if key not in KEYS:
            raise UsageError(f"{path}.{key}: unknown key; the keys here are {', '.join(KEYS)}")
    types = entry.get("model_types")
    if types and str(kind).lower() not in [str(model_type).lower() for model_type in types]:
        return None
    text = str(entry.get("partition_type", "column"))
    if text not in WORDS:
        known = ", ".join(f'"{name}"' for name in WORDS)
        raise UsageError(f"{path}.partition_type = {text!r}: must be one of {known}")
    style_name = WORDS[text]
    if entry.get("gather_output") and style_name is StyleName.COLWISE:
        style_name = StyleName.COLWISE_GATHER
    dim = entry.get("partition_dim")
    if dim is not None and dim != {StyleName.ROWWISE: 1}.get(style_name, 0):
        raise UsageError(
            f"{path}.partition_dim = {dim!r}: columns are dimension 0 and rows are dimension 1 of a weight; "
            "leave it out"
        )
    patterns = entry["patterns"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return _Spec(
        path, tuple(_pattern(pattern, path) for pattern in patterns), style_name, entry.get("shape")
    )


def _pattern(text: Any, path: str) -> str:
    try:
        check_expression(str(text))
    except ValueError as error:
        raise UsageError(f"{path}.patterns: {quoted(text)} {error}") from None
    return str(text)


def _style(spec: _Spec, name: str, module: nn.Module) -> ParallelStyle:
    style_name = spec.style_name
    if isinstance(module, nn.Embedding) and style_name is not StyleName.WHOLE:
        style_name = StyleName.EMBEDDING
    check_module(name, module, style_name)
    if spec.shape is None or style_name is StyleName.WHOLE:
        return ParallelStyle(style_name)
    length = length_of(module, style_name)
    parts = _parts(spec.shape, length, style_name)
    if parts is None:
        raise UsageError(
            f"{spec.path}.shape = {spec.shape!r}: {name} has {length} columns or rows to cut; write the number "
            "of equal parts as [3, -1], or their sizes as [[64, 16, 16], -1]"
        )
    return ParallelStyle(style_name, parts)


def _parts(shape: Any, length: int, style_name: StyleName) -> tuple[int, ...] | None:
    """The sizes of the packed parts; None: the shape does not fit."""
    if not isinstance(shape, Sequence) or len(shape) != 2:
        return None
    sizes_along = shape[1] if style_name is StyleName.ROWWISE else shape[0]
    if isinstance(sizes_along, Sequence) and not isinstance(sizes_along, str):
        sizes = tuple(int(size) for size in sizes_along)
        return sizes if sum(sizes) == length and min(sizes) > 0 else None
    if not isinstance(sizes_along, int) or sizes_along == 0 or sizes_along < -1:
        return None
    count = 1 if sizes_along in (-1, length) else sizes_along
    return (length // count,) * count if length % count == 0 else None


__all__ = ["has_specs", "keeps_own_plan", "read_specs"]
