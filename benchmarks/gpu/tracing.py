"""Section --trace: kernels of the update, gaps between kernels, and the host's time of one step."""

from __future__ import annotations

from scale import sequences
from session import Failed, Session, scratch

from harness import Row  # isort: skip


def run(session: Session) -> None:
    """The rows alone."""
    session.measure_rate()
    rows(session)


def rows(session: Session, size: str = "350M") -> None:
    """Rows of stages 0, 2 and 3, eager; the traces are beside the results."""
    for stage in (2, 3, 0):
        child = session.child()
        try:
            child.ask(
                "build",
                session.deadline,
                size=size,
                kind=f"xds-{stage}",
                sequences=1 if session.small else sequences(size, 80 << 30),
            )
            name = f"-stage{stage}.trace.json"
            file = session.file(name) if session.section == "trace" else scratch() / f"step{name}"
            found = child.ask("trace", session.deadline, file=str(file))
        except Failed as error:
            session.skip(f"stage {stage}: launches of the update", str(error))
            continue
        finally:
            child.end()
        most = found["flats"] + 2
        note = f"{found['flats']} flats in {found['groups']} groups, so at most {most}"
        print(f"# stage {stage} launches: " + "; ".join(found["names"]), flush=True)
        name = f"{size} stage {stage}"
        session.add(
            Row(
                f"{name}: launches of the update", found["launches"], must=most, unit="", note=note
            ),
            Row(
                f"{name}: device idle in a step",
                found["idle"] / found["device"] if found["device"] else 0.0,
                unit="",
                note=f"largest gap {1e6 * found['largest_gap']:.0f} us, {found['kernels']} kernels, "
                f"device {1e3 * found['device']:.1f} ms, host {1e3 * found['host']:.1f} ms (profiled)",
            ),
        )
