"""The environment variables that are forwarded to other machines: a list of names, and those in files.

Other variables are not forwarded. PATH, HOME and devices belong to each machine. Secrets are forwarded only if
a file names them. The files are DeepSpeed's `.deepspeed_env` (or the one in DS_ENV_FILE) and `.xds_env` (or the
one in XDS_ENV_FILE), in the home folder and in the working folder. The working folder takes precedence. A file
that another user may change is ignored, unless a variable has its path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...ops.device import OF_ONE_MACHINE, PREFIXES
from ...utils.errors import UsageError
from ...utils.quoting import quoted
from ...utils.small_files import read_small_text
from ...utils.trust import is_found

# DeepSpeed's list, and variables that affect speed or results of torch, its networks and its kernels
_PREFIXES = (
    *("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"),
    *(
        "XDS_",
        "GLOO_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "PYTORCH_",
        "TRITON_",
    ),
    *PREFIXES,
    *(
        "OMP_",
        "MKL_",
        "KMP_",
        "FI_",
        "HF_",
        "TRANSFORMERS_",
        "WANDB_",
        "TOKENIZERS_",
    ),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
# device numbers differ by machine; the others concern this process only, or have been read here already
_NEVER_FORWARDED = re.compile(
    rf"{'|'.join(OF_ONE_MACHINE)}|PYTHON(STARTUP|INSPECT|BREAKPOINT|_HISTORY)"
    "|XDS_(SSH|ENV_FILE|RUN_FOLDER|LOG_FOLDER|GRACE_FILE|HEARTBEAT_SECONDS|LAUNCHER_PID|RANK_.*)"
    "|(.*_)?(TOKENS?|(API)?KEYS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_.*)?"
)
_FILES = ((".deepspeed_env", "DS_ENV_FILE"), (".xds_env", "XDS_ENV_FILE"))
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def forwarded_variables(
    environ: Mapping[str, str], folder: str | Path, home: str | Path
) -> dict[str, str]:
    """The variables that are set on every other machine.

    Args:
        environ: the environment of this process; folder: the working folder; home: the home folder.
    Raises:
        UsageError: a line of a file is not KEY=value, or a file named by a variable does not exist.
    """
    variables = {key: value for key, value in environ.items() if _is_forwarded(key)}
    for name, key in _FILES:
        for path in _files(name, key, environ.get(key, ""), Path(folder), Path(home)):
            variables.update(_read(path))
    return variables


def _is_forwarded(key: str) -> bool:
    if not _NAME.fullmatch(key) or _NEVER_FORWARDED.fullmatch(key):
        return False
    return key in _NAMES or key.startswith(_PREFIXES)


def _files(name: str, key: str, name_or_path: str, folder: Path, home: Path) -> Iterator[Path]:
    """The files to read; later ones take precedence. A file given by a path is the only one."""
    if os.sep in name_or_path:
        yield Path(name_or_path)
        return
    name = name_or_path or name
    paths = [home / name] if _same(home, folder) else [home / name, folder / name]
    there = [path for path in paths if path.is_file()]
    if name_or_path and not there:
        yield paths[-1]  # reading it raises the error about the missing file
    yield from (path for path in there if is_found(path, f"{key}={path.absolute()}"))


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _read(path: Path) -> dict[str, str]:
    try:
        text = read_small_text(path)
    except OSError as error:
        raise UsageError(
            f"environment file = {quoted(path)}: {error.strerror}; give a text file of lines KEY=value"
        ) from None
    pairs: dict[str, str] = {}
    for number, line in enumerate(re.split("\r\n|\n|\r", text), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = stripped.removeprefix("export ").partition("=")
        key = key.strip()
        if not equals or not _NAME.fullmatch(key) or "\0" in value:
            raise UsageError(
                f"environment file = {quoted(path)}, line {number}: {quoted(_shown(stripped))} is not"
                " KEY=value; correct it, or begin it with # to skip it"
            )
        pairs[key] = value.strip()
    return pairs


def _shown(line: str) -> str:
    """Enough of a bad line to find it, without the value, which may be a secret."""
    key, equals, _ = line.partition("=")
    return f"{key[:40]}{equals}..." if equals or len(line) > 40 else line
