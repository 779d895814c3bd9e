"""Fills "auto" and missing keys of a config from a trainer's arguments, and refuses contradictions.

The config's own values apply; the trainer's arguments set all other keys. A value that both give must be
equal, otherwise it would be unclear which of the two applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from ...utils.errors import ConfigError, UsageError
from ...utils.schema.keys import AUTO, joined
from ...utils.schema.rules import shown
from ..config.config import Config, canonical_path, parse_config
from ..config.text import read_source


@dataclass(frozen=True)
class Given:
    """One value from the trainer.

    origin: its name for the user, e.g. "TrainingArguments.learning_rate".
    is_checked: a config with another value is refused.
    is_default: the key is added if the config does not have it.
    """

    value: Any
    origin: str = ""
    is_checked: bool = True
    is_default: bool = False


Values = Mapping[str, Given]


@final
class Source:
    """A config as written, before values are filled in."""

    def __init__(self, source: object) -> None:
        """Raises ConfigError: it cannot be read. Raises UsageError: it is already a Config."""
        if isinstance(source, Config):
            raise UsageError(
                "xds_config is an xds.Config, which is already filled in: pass its source, a path, JSON text "
                "or a dict"
            )
        self.data, self.name, self._complaints = read_source(source)
        if not isinstance(self.data, dict):
            Config.load(self.data)  # raises the usual ConfigError
        self._flat = dict(_leaves(self.data, ""))

    def get(self, path: str) -> Any:
        """The value as written, by canonical path; None if it is not given."""
        return self._flat.get(path)

    def data_ranks(self, num_ranks: int) -> int:
        """The data-parallel ranks among `num_ranks`; all of them if the written stages do not divide them."""
        stages = self.get("pipeline.stages")
        is_number = isinstance(stages, int) and stages > 0
        return num_ranks // stages if is_number and num_ranks % stages == 0 else num_ranks

    def has_section(self, name: str) -> bool:
        return isinstance(self.data.get(name), dict)

    def filled(self, values: Values, *, logs: bool = False) -> Config:
        """The config with `values` (by canonical path) filled in; `logs`: log the keys without effect.

        Raises:
            ConfigError: every complaint at once, about the config itself and about contradictions.
        """
        complaints = [*self._complaints, *self._contradictions(values)]
        data = _copied(self.data)
        for path, given in values.items():
            if given.is_default and path not in self._flat:
                _put(data, path, given.value)
        read = Config.load if logs else parse_config
        try:
            config = read(data, auto={path: given.value for path, given in values.items()})
        except ConfigError as error:
            raise ConfigError([*error.complaints, *complaints], self.name) from None
        if complaints:
            raise ConfigError(complaints, self.name)
        return config.model_copy(update={"source": self.name})

    def _contradictions(self, values: Values) -> Iterator[str]:
        for path, given in values.items():
            written = self.get(path)
            if not given.is_checked or written is None or _is_auto(written):
                continue
            if not _is_same(written, given.value):
                yield (
                    f"{path} = {shown(written)}: but {given.origin} = {shown(given.value)}; make the two "
                    'equal, or write "auto" in the config'
                )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield canonical_path(path), value
        return
    for key, inner in value.items():
        yield from _leaves(inner, joined(path, key))


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        wanted = (name for name in data if canonical_path(name) == section)
        inner = data.setdefault(next(wanted, section), {})
        if not isinstance(inner, dict):
            return  # the config is wrong here; reading it reports the error
        data = inner
    data[key] = value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.casefold() == AUTO


def _is_same(written: Any, known: Any) -> bool:
    if isinstance(known, (list, tuple)):
        is_list = isinstance(written, (list, tuple)) and len(written) == len(known)
        return is_list and all(map(_is_same, written, known))
    return bool(written == known)


# -- values that depend on the model ------------------------------------------------------------------------


def hidden_size_of(model: Any) -> int | None:
    """The width in the model's own config, the largest of several; None if it has none."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        size = getattr(place, "hidden_size", None)
        sizes = [size] if isinstance(size, int) else getattr(place, "hidden_sizes", None)
        if sizes:
            return int(max(sizes))
    return None


def sized_by(hidden_size: int | None) -> dict[str, Given]:
    """The ZeRO keys that Trainer and Accelerate derive from the model's width; fractions are rounded later."""
    if hidden_size is None:
        return {}  # "auto" then means the default of xds
    square = hidden_size * hidden_size
    values = {
        "reduce_bucket_size": square,
        "prefetch_bucket_size": 0.9 * square,
        "param_persistence_threshold": 10 * hidden_size,
    }
    return {
        f"zero_optimization.{key}": Given(value, is_checked=False) for key, value in values.items()
    }


def precision(
    source: Source, *, bf16: Given | None, fp16: Given | None, is_default: bool
) -> dict[str, Given]:
    """The keys that enable a precision, or those of torch_autocast if the config uses it.

    Args:
        bf16, fp16: whether the trainer requests it.
        is_default: the trainer's choice applies if the config has no such section.
    """
    known = {"bf16": bf16, "fp16": fp16}
    autocast = source.get("torch_autocast.enabled")
    if autocast is True or (autocast is not None and _is_auto(autocast)):
        requested = [name for name, given in known.items() if given is not None and given.value]
        values = {f"{name}.enabled": Given(False, is_checked=False) for name in known}
        values["torch_autocast.enabled"] = Given(bool(requested), is_checked=False)
        if requested:
            full = {"bf16": "bfloat16", "fp16": "float16"}
            values["torch_autocast.dtype"] = Given(full[requested[0]], is_checked=False)
        return values
    chosen = any(source.get(f"{name}.enabled") is True for name in known)
    return {
        f"{name}.enabled": Given(
            given.value, given.origin, is_default=is_default and not chosen and bool(given.value)
        )
        for name, given in known.items()
        if given is not None
    }
