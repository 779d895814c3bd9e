"""Test helper: manifests that are changed, and whose sum is right: as by a script, or by another version."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from xds.engine.checkpoint.format import HEAD, NO_SUM

MANIFEST = "manifest.json"
TOO_DEEP = "this becomes an abyss"  # in the text alone: Python cannot hold such a value


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest of the checkpoint in `folder` in place."""
    raw = json.loads((folder / MANIFEST).read_text())
    change(raw)
    (folder / MANIFEST).write_bytes(manifest_text(raw))


def manifest_text(raw: dict[str, Any]) -> bytes:
    """The text of a manifest, with its sum made right."""
    body = {key: value for key, value in raw.items() if key != "sha256"}
    return with_sum(json.dumps(body)[1:].replace(json.dumps(TOO_DEEP), "[" * 50_000 + "]" * 50_000))


def with_sum(rest: str) -> bytes:
    """The same for the text that follows the sum."""
    text = f'{HEAD}{NO_SUM}", {rest}'.encode()
    return text.replace(NO_SUM.encode(), sha256(text).hexdigest().encode(), 1)
