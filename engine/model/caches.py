"""Key-value caches among the arguments of a block."""

from __future__ import annotations

from typing import Any


def is_cache(value: Any) -> bool:
    """Whether this is a key-value cache, recognised by the method names of `transformers`."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments without caches, for a call that must not write to one."""
    if not any(is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if is_cache(value) else value for value in args)
    kwargs = {key: None if is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


__all__ = ["is_cache", "without_caches"]
