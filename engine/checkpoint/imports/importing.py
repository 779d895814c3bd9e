"""Makes an xds checkpoint of another program's: what the source is, what of it is taken, where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....utils.errors import UsageError
from ..io.folders import LATEST, MANIFEST
from .deepspeed import is_deepspeed, read_deepspeed
from .imported import Imported
from .weights import find_weights, read_weights

AUTO, DEEPSPEED, HUGGINGFACE, TORCH = "auto", "deepspeed", "huggingface", "torch"
SOURCES = (AUTO, DEEPSPEED, HUGGINGFACE, TORCH)
WEIGHTS_TAG = "imported"  # where the source has no tags


@dataclass(frozen=True)
class ImportReport:
    """What an import made. notes: a sentence for everything that the source has and the checkpoint has not."""

    folder: Path
    origin: str
    num_tensors: int
    numel: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: str | Path, save_dir: str | Path, tag: str | None = None, kind: str = AUTO
) -> ImportReport:
    """Commit what `source` holds as a checkpoint in `save_dir`; `engine.load_checkpoint(save_dir)` goes on.

    Args:
        source: a DeepSpeed checkpoint (the folder with `latest`, or one tag's), a Hugging Face folder, or a
            file of safetensors or torch.save. Nothing in it is executed.
        tag: which of DeepSpeed's tags (default: `latest`); of weights: the tag to import as.
        kind: auto, deepspeed, huggingface or torch.
    Memory:  tensors are mapped from the files and written in one stream.
    Raises:
        UsageError: the source is not there, not whole, or cannot be read safely; save_dir has the tag.
        OSError: as the file system does. Either way save_dir is as it was.
    """
    source, save_dir = Path(source), Path(save_dir)
    if kind not in SOURCES:
        raise UsageError(f"--from {kind}: there is {', '.join(SOURCES)}")
    if not source.exists():
        raise UsageError(f"{source} does not exist")
    found = _read(source, tag, kind)
    folder = found.write(save_dir, found.tag)
    numel = sum(flat.numel for flat in found.flats)
    return ImportReport(folder, found.origin, len(found.flats), numel, tuple(found.notes))


def _read(source: Path, tag: str | None, kind: str) -> Imported:
    folder = _tag_folder(source, tag) if source.is_dir() and kind in (AUTO, DEEPSPEED) else None
    if folder is not None and (kind == DEEPSPEED or is_deepspeed(folder)):
        if not is_deepspeed(folder):
            raise UsageError(f"{folder} is no DeepSpeed checkpoint: it has no *_model_states.pt")
        return _deepspeed(folder)
    if kind == DEEPSPEED:
        raise UsageError(f"{source} is a file: a DeepSpeed checkpoint is a folder")
    weights = find_weights(source)
    if weights is None or (kind == HUGGINGFACE and source.is_file()):
        raise UsageError(_what_is(source))
    return read_weights(weights, tag or WEIGHTS_TAG)


def _deepspeed(folder: Path) -> Imported:
    """Raises UsageError: also where a value has another form than DeepSpeed gives it."""
    try:
        return read_deepspeed(folder)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"{folder} has another form than DeepSpeed 0.19's checkpoints, for which this was written: "
            f"{type(error).__name__}: {error}"
        ) from error


def _tag_folder(source: Path, tag: str | None) -> Path:
    """The folder of one tag of a DeepSpeed checkpoint, if `source` is one."""
    if is_deepspeed(source):
        return source
    if tag is not None:
        tags = sorted(folder.name for folder in source.iterdir() if is_deepspeed(folder))
        if tags and tag not in tags:
            raise UsageError(f"{source} has no checkpoint {tag!r}; there is {', '.join(tags)}")
        return source / tag
    latest = source / LATEST
    return source / latest.read_text().strip() if latest.is_file() else source


def _what_is(source: Path) -> str:
    if list(source.glob(f"*/{MANIFEST}")) or (source / MANIFEST).exists():
        return f"{source} is a checkpoint of xds already: load it as it is"
    return (
        f"{source} is nothing that can be imported: no DeepSpeed checkpoint (latest, *_model_states.pt), no "
        "Hugging Face folder (model.safetensors, pytorch_model.bin, or an index of them), no file of weights"
    )
