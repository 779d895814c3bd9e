"""Lets `import deepspeed` be `xds.deepspeed`, in processes that ask for it, without a change of the script.

`xds --as-deepspeed` and the variable XDS_AS_DEEPSPEED=1 ask. A file xds_as_deepspeed.pth in the environment's
site-packages calls `activate` at the start of every Python process where the variable is set. Elsewhere nothing
happens. An installed DeepSpeed is not touched; it is what `import deepspeed` finds in all other processes.

This package imports little, because it is imported before the script.
"""

from __future__ import annotations

VARIABLE = "XDS_AS_DEEPSPEED"
OFF = ("", "0", "false")


def is_asked_for() -> bool:
    """Whether this process's environment asks for the stand-in."""
    import os

    return os.environ.get(VARIABLE, "").lower() not in OFF


def activate() -> None:
    """Let `import deepspeed` find `xds.deepspeed`, also for importlib.metadata. A second call does nothing."""
    from .finders import install_alias

    if not is_active():
        import atexit

        atexit.register(_at_exit)
    install_alias()


def _at_exit() -> None:
    from .unused import warn_of_unused

    warn_of_unused()


def is_active() -> bool:
    """Whether `import deepspeed` finds `xds.deepspeed` in this process."""
    from .finders import is_alias_installed

    return is_alias_installed()
