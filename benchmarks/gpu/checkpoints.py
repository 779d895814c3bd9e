"""Section --checkpoints: saves and loads at stages 0 to 3, blocking and in the background."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from session import Failed, Session

from harness import Row  # isort: skip

SIZE, STATES = "350M", 12  # bytes of a parameter in a checkpoint: master and two moments


def run(session: Session) -> None:
    """All rows. Each contestant saves twice: the second one counts, the first one takes the memory."""
    session.measure_rate()
    folder = tempfile.mkdtemp(prefix="xds-bench-", dir=session.options.disk)
    try:
        peer = _saved(session, "plain", {}, "torch_save", folder)
        _show(session, "torch.save of masters and moments", peer, None)
        for stage in (0, 3) if session.small else range(4):
            for is_async in (False, True):
                how = "background" if is_async else "blocking"
                more = {"checkpoint": {"async_save": is_async}}
                found = _saved(session, f"xds-{stage}", more, "save", folder)
                _show(session, f"stage {stage} {how}", found, peer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _saved(session: Session, kind: str, more: dict[str, Any], what: str, folder: str) -> Any:
    """The answer of the second save, or the reason why there is none."""
    if session.left < (2 if session.small else 40):
        return "time"
    free = shutil.disk_usage(folder).free
    if not session.small and free < 15e9:
        return f"{folder} has {free / 1e9:.0f} GB free, 15 are needed: give --disk FOLDER"
    child = session.child()
    try:
        child.ask("build", session.deadline, size=SIZE, kind=kind, sequences=1, more=more)
        target = str(Path(folder) / "save")
        child.ask(what, session.deadline, folder=target)
        return child.ask(what, session.deadline, folder=target)
    except Failed as error:
        return str(error)
    finally:
        child.end()


def _show(session: Session, name: str, found: Any, peer: Any) -> None:
    if isinstance(found, str):
        session.skip(f"{name}: save", found)
        return
    note = (
        f"{found['bytes'] / 1e9:.2f} GB, complete after {found['whole']:.2f} s, "
        f"{found['bytes'] / found['whole'] / 1e9:.2f} GB/s"
    )
    session.add(Row(f"{name}: save, seconds of the call", found["call"], unit=" s", note=note))
    rate = f"{found['bytes'] / found['load'] / 1e9:.2f} GB/s, the file cache is warm"
    session.add(Row(f"{name}: load", found["load"], unit=" s", note=rate))
    if peer is None:
        return
    if isinstance(peer, str):
        session.skip(f"{name}: save / torch.save", peer)
        return
    session.add(Row(f"{name}: save / torch.save", found["call"] / peer["call"], must=1.0))
