"""The version of transformers that features need which enter functions in its tables."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .errors import UsageError

_FIRST_MAJOR = 5  # its functions for masks and attention have the arguments that xds passes


def need_transformers(setting: str) -> None:
    """Check that the installed transformers fits. Once, where `setting` is put into effect.

    Raises:
        UsageError: it is older.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:  # a copy that was not installed
        return
    major = installed.partition(".")[0]
    if major.isdecimal() and int(major) < _FIRST_MAJOR:
        raise UsageError(
            f"{setting}: needs transformers {_FIRST_MAJOR} or later, and {installed} is installed; run "
            f'pip install "transformers>={_FIRST_MAJOR}", or remove the setting'
        )


__all__ = ["need_transformers"]
