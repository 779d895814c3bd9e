"""Finds the layers that each technique compresses, and gives them their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ...utils.errors import ConfigError, UsageError
from .config import CompressionTraining, Group
from .cuts import cuts_of
from .layers import KINDS, CompressedLayer, compressed_class, is_conv1d, matching

SHOWN_NAMES = 8


def compress(model: nn.Module, section: CompressionTraining) -> list[str]:
    """Give the layers that `section` names their compressed classes, in place; their names.

    Raises:
        ConfigError: a pattern matches no layer, or two match the same; all complaints at once.
        UsageError: a layer cannot be compressed, or is already.
    """
    if done := [name for name, _ in compressed_layers(model)]:
        raise UsageError(f"init_compression: {_shown(done)} compressed already; call it once")
    found = check_layers(model, section)
    layers = dict(model.named_modules())
    for name, settings in found.items():
        layer: Any = layers[name]
        layer.__class__ = compressed_class(type(layer))
        layer.begin(settings)
    for module in layers.values():
        if isinstance(module, nn.TransformerEncoderLayer) and any(compressed_layers(module)):
            module.register_forward_pre_hook(_slow_path)
    return list(found)


def check_layers(
    model: nn.Module, section: CompressionTraining
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Name of a layer that `section` compresses -> technique -> its settings.

    Raises:
        ConfigError, UsageError: as `compress`.
    """
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    complaints: list[str] = []
    for technique in section.enabled:
        shared = getattr(section, technique).shared_parameters
        for name, group in _matches(model, technique, section.groups(technique), complaints):
            found.setdefault(name, {})[technique] = (shared, group.params)
    if complaints:
        raise ConfigError(complaints, "compression_training")
    layers = dict(model.named_modules())
    for name, settings in found.items():
        _check(name, layers[name], settings)
    cuts_of(model, section)
    return found


def is_compressed_by(model: nn.Module, section: CompressionTraining) -> bool:
    """The layers of a compressed model have settings of `section`, whatever their names are now."""
    found = [each for _, layer in compressed_layers(model) for each in layer.settings.items()]
    return {technique for technique, _ in found} == set(section.enabled) and all(
        shared == getattr(section, technique).shared_parameters
        and any(params == group.params for group in section.groups(technique))
        for technique, (shared, params) in found
    )


def _slow_path(module: nn.Module, args: Any) -> None:
    """A hook turns off the path of torch's encoder layers that reads weights and calls no layer."""


def compressed_layers(model: nn.Module) -> Iterable[tuple[str, CompressedLayer]]:
    """The compressed layers of a model, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, CompressedLayer)
    ]


def _matches(
    model: nn.Module, technique: str, groups: list[Group], complaints: list[str]
) -> list[tuple[str, Group]]:
    """(name of a layer, its group) for one technique."""
    owner: dict[str, Group] = {}
    for group in groups:
        for pattern in group.modules:
            path = f"{technique}.different_groups.{group.name}.modules"
            names = matching(model, pattern, KINDS[technique])
            if not names:
                kinds = ", ".join(kind.__name__ for kind in KINDS[technique])
                complaints.append(
                    f'{path} = "{pattern}": no layer of the kinds {kinds} has such a name; correct the '
                    "pattern, or remove it"
                )
            twice = [name for name in names if name in owner]
            if twice:
                complaints.append(
                    f'{path} = "{pattern}": {_shown(twice)} in group {owner[twice[0]].name} already; let each '
                    "layer match one pattern of a technique"
                )
            owner.update((name, group) for name in names if name not in owner)
    return list(owner.items())


def _check(name: str, layer: nn.Module, settings: dict[str, tuple[Any, Any]]) -> None:
    """Raises UsageError: the class or the sizes of a layer do not fit its techniques."""
    if compressed_class(type(layer)) is None:
        raise UsageError(
            f"compression_training: {name} is a {type(layer).__name__}, which may read its weight without "
            "calling forward; only plain nn.Linear, nn.Conv2d, nn.Embedding and Conv1D are compressed. Exclude "
            "it by the pattern"
        )
    if "weight" not in layer._parameters:
        raise UsageError(
            f"compression_training: the weight of {name} is computed by a hook, as torch.nn.utils.weight_norm "
            "does, and is no parameter; remove the hook, or exclude the layer by the pattern"
        )
    if getattr(layer, "max_norm", None) is not None:
        raise UsageError(
            f"compression_training: {name} has max_norm, which changes its weight in forward; remove it, or "
            "exclude the layer by the pattern"
        )
    weight: Tensor = layer.weight  # type: ignore[assignment]
    for technique, (shared, _) in settings.items():
        if technique == "weight_quantization":
            by_row = isinstance(layer, nn.Embedding) and shared.quantize_weight_in_forward
            if not by_row and weight.numel() % shared.quantize_groups:
                raise UsageError(
                    f"compression_training.weight_quantization: quantize_groups = {shared.quantize_groups} "
                    f"does not divide the {weight.numel()} elements of {name}; choose a divisor"
                )
        if technique == "head_pruning":
            columns = weight.shape[0] if is_conv1d(type(layer)) else weight.shape[1]
            if columns % shared.num_heads:
                raise UsageError(
                    f"compression_training.head_pruning: num_heads = {shared.num_heads} does not divide the "
                    f"{columns} inputs of {name}; modules must name output projections of attentions"
                )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more} {'is' if len(names) == 1 else 'are'}"


# -- the schedule -------------------------------------------------------------------------------------------


class Schedule:
    """Brings the compressed layers of a model to the state after a number of steps."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(compressed_layers(model))
        self._step = -1

    def advance(self, step: int, whole: Callable[[nn.Parameter], Tensor]) -> None:
        """The state after `step` steps. Masks that are due are computed from `whole(weight)`."""
        for _, layer in self._layers:
            for technique in layer.due(self._step, step):
                layer.set_mask(technique, whole(layer.weight))
        self.resume(step)

    def resume(self, step: int) -> None:
        """The same, with the masks that the buffers hold."""
        self._step = step
        for _, layer in self._layers:
            layer.advance(step)


__all__ = ["Schedule", "compress", "compressed_layers", "is_compressed_by"]
