"""The page of a run: one HTML file without scripts, which needs no other. All text of the record is escaped."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Iterator

from ...utils.sizes import size_text
from .charts import KINDS, chart, curve, number_text, shown, timeline
from .records import Experts, Run, Start

MOST_ROWS = 30
MOST_EXPERTS = 1024  # of a layer
TOKENS = "tokens_per_sample"  # the name of a value by which the page multiplies samples
_SPEEDS = 400
STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2330;--dim:#667085;--edge:#e2e6ee;--card:#f7f8fb;
--a:#2f6fdb;--b:#d9730d;--c:#0f8a5f;--d:#8250c8;--e:#98a2b3;--f:#d6a21c;--bad:#c62828}
@media(prefers-color-scheme:dark){:root{--bg:#12161d;--fg:#e6eaf2;--dim:#9aa4b5;--edge:#2a313d;--card:#1a2029;
--a:#6aa5ff;--b:#f0a35a;--c:#4fc79a;--d:#b794f6;--e:#6b7688;--f:#e8c34a;--bad:#ff7b72}}
*{box-sizing:border-box}body{margin:0 auto;padding:24px;max-width:1120px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}h1{font-size:24px;margin:0}h2{font-size:17px;margin:32px 0 8px}
p{margin:4px 0;color:var(--dim)}
.tiles,.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(125px,1fr))}
.charts{grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr))}.tiles{margin:20px 0}
.tiles div,figure{background:var(--card);border:1px solid var(--edge);border-radius:8px;margin:0;
padding:10px 14px}
.tiles b{display:block;font-size:18px;white-space:nowrap}.tiles span,figcaption{color:var(--dim);font-size:13px}
figcaption span{margin-left:10px}figcaption b{color:var(--fg)}svg{width:100%;display:block}
svg text{fill:var(--dim);font-size:10.5px;font-family:system-ui,sans-serif}.grid{stroke:var(--edge)}
.a{--k:var(--a)}.b{--k:var(--b)}.c{--k:var(--c)}.d{--k:var(--d)}.e{--k:var(--e)}.f{--k:var(--f)}
.line{fill:none;stroke:var(--k);stroke-width:1.6}.fill{fill:var(--k)}.band{fill:var(--a);opacity:.18}
.key:before{content:"";display:inline-block;width:9px;height:9px;border-radius:2px;background:var(--k);margin-right:5px}
table{border-collapse:collapse;width:100%;font-size:14px}th,td{text-align:left;padding:4px 12px 4px 0;
border-bottom:1px solid var(--edge);vertical-align:top;font-weight:400}
td:last-child{overflow-wrap:anywhere}th{color:var(--dim);white-space:nowrap}
td.wide{width:55%}td.wide~td{white-space:nowrap}meter{width:100%}.bad{color:var(--bad)}
pre{max-height:340px;
background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:12px;overflow:auto;margin:0;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}td pre{border:0;padding:0;background:none}
@media(max-width:600px){body{padding:14px}td:has(meter){display:none}td.wide{width:auto}
th,td.wide~td{white-space:normal}}
"""


def page_of(run: Run, name: str, now: float) -> str:
    """The HTML of a run. now: when it is made, in seconds."""
    title = shown(run.start.command or name, 120)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none';style-src 'unsafe-inline'\">",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{shown(name, 80)}</title><style>{STYLE}</style>",
        f"<h1>{shown(name, 80)}</h1><p>{title}<p>{_state_text(run, now)}",
        _tiles(run),
        f"<h2>Training</h2><div class=charts>{''.join(_curves(run))}</div>",
    ]
    for heading, body in _sections(run):
        parts += [f"<h2>{heading}</h2>", body] if body else []
    return "\n".join([*parts, "</html>", ""])


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e10:
        return "unknown"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _state_text(run: Run, now: float) -> str:
    texts = {"end": "The run has ended.", "failure": '<span class="bad">The run has failed.</span>'}
    text = texts.get(run.state, "The run goes on, or was killed.")
    text += f" Last line: {_clock(run.last_time)}, {_duration(max(now - run.last_time, 0.0))} before this page."
    if run.damaged:
        text += f' <span class="bad">{run.damaged} damaged lines of the record were skipped.</span>'
    if run.foreign:
        text += (
            f' <span class="bad">{run.foreign} lines of another engine, which wrote here at the same time, '
            "were left out.</span>"
        )
    return text


# -- figures and curves -----------------------------------------------------------------------------------


def _tiles(run: Run) -> str:
    _, speeds = _speeds(run)
    unit = "tokens/s" if _tokens(run) != 1 else "samples/s"
    tiles = [
        ("steps", f"{run.steps[-1]:,}" if run.steps else "none yet"),
        ("loss", number_text(run.loss[-1]) if run.loss else ""),
        (unit, number_text(sorted(speeds)[len(speeds) // 2]) if speeds else ""),
        ("time of all steps", _duration(_trained_seconds(run)) if len(run.times) > 1 else ""),
        ("peak memory", _bytes(max(run.memory[2])) if run.memory[2] else ""),
        ("ranks", shown(run.start.ranks, 20)),
        ("starts", str(run.num_starts)),
        ("goodput", _share(run.ledger["step"], _total(run)) if _total(run) else ""),
    ]
    filled = [f"<div><span>{name}</span><b>{text}</b></div>" for name, text in tiles if text]
    return f"<div class=tiles>{''.join(filled)}</div>"


def _total(run: Run) -> float:
    return sum(run.ledger.values())


def _share(part: float, total: float) -> str:
    return f"{part / total:.1%}"


def _bytes(size: float) -> str:
    return size_text(int(size)) if 0 <= size < 1e18 else "unknown"


def _trained_seconds(run: Run) -> float:
    """From the first step to the last one, without the time between processes."""
    lost = sum(run.times[at] - run.times[at - 1] for at in run.breaks)
    return run.times[-1] - run.times[0] - lost


def _tokens(run: Run) -> float:
    values = run.values.get(TOKENS, (array("d"), array("d")))[1]
    return values[-1] if values and 0 < values[-1] < math.inf else 1.0


def _speeds(run: Run) -> tuple[list[float], list[float]]:
    """Steps, and samples or tokens per second since the point before; without times between processes."""
    count, tokens = len(run.steps), _tokens(run)
    marks = sorted({n * (count - 1) // _SPEEDS for n in range(_SPEEDS + 1)}) if count > 1 else []
    xs, ys, breaks = [], [], iter([*run.breaks, count + 1])
    at = next(breaks)
    for start, stop in zip(marks, marks[1:], strict=False):
        while at <= start:
            at = next(breaks)
        seconds = run.times[stop] - run.times[start]
        if at > stop and seconds > 0:
            xs.append(float(run.steps[stop]))
            ys.append(tokens * (run.samples[stop] - run.samples[start]) / seconds)
    return xs, ys


def _curves(run: Run) -> Iterator[str]:
    series = {
        name: curve([run.step_at(at) for at in where], found)
        for name, (where, found) in run.values.items()
        if name != TOKENS
    }
    losses = [(name, each) for name, each in series.items() if "loss" in name.lower()][:4]
    yield chart("Loss", [("training", curve(run.steps, run.loss)), *losses])
    unit = "Tokens" if _tokens(run) != 1 else "Samples"
    yield chart(f"{unit} per second", [("all ranks", curve(*_speeds(run)))], starts_at_0=True)
    yield chart("Learning rate", [("", curve(run.steps, run.rates))], starts_at_0=True)
    yield chart("Gradient norm", [("before clipping", curve(run.steps, run.norms))])
    memory = [curve(run.memory[0], [size / 1e9 for size in run.memory[n]]) for n in (2, 1)]
    both = [("peak", memory[0]), ("now", memory[1])]
    yield chart("Memory of rank 0 in GB", both, starts_at_0=True)
    for name, each in series.items():
        if name not in dict(losses):
            yield chart(name, [("", each)])


# -- tables -----------------------------------------------------------------------------------------------


def _sections(run: Run) -> Iterator[tuple[str, str]]:
    if run.timelines:
        last = run.timelines[-1]
        heading = f"Step {last.step} in time"
        staged = any(span.label for each in last.ranks for span in each.spans)
        yield f"Pipeline: {heading.lower()}" if staged else heading, _timeline(run)
    if run.experts is not None:
        yield f"Tokens of experts in step {run.experts.step}", _experts(run.experts)
    yield "Time", _ledger(run)
    yield "Time that failures have cost", _failures(run)
    yield "Bytes sent by rank 0", _traffic(run)
    yield "Starts, failures and checkpoints", _events(run)
    start = run.start
    again = f"cd {shown(start.folder)}\n{shown(start.command)}"
    yield "Run it again", f"<pre>{again}</pre>"
    config = json.dumps(start.config, indent=2)
    yield "Config: what differs from the defaults", f"<pre>{shown(config)}</pre>"
    yield "Versions", _versions(run)


def _timeline(run: Run) -> str:
    found = run.timelines[-1]
    drawn = timeline(found)
    legend = "".join(
        f'<span class="key {kind}">{name}</span>'
        for name, kind in KINDS.items()
        if f'"fill {kind}"' in drawn
    )
    peaks = [each.peak_bytes for each in found.ranks]
    note = f"Peak memory of these ranks: {_bytes(min(peaks))} to {_bytes(max(peaks))}."
    return f"<figure><figcaption>{legend}</figcaption>{drawn}</figure><p>{note}" if drawn else ""


def _traffic(run: Run) -> str:
    if run.use is None or not run.use.sent_bytes:
        return ""
    steps = max(run.use.steps, 1.0)
    found = sorted(run.use.sent_bytes.items(), key=lambda item: -item[1])[:MOST_ROWS]
    rows = [
        f'<tr><th>{shown(kind, 40)}<td class=wide><meter max="{found[0][1]}" value="{size}"></meter>'
        f"<td>{_bytes(size)}<td>{_bytes(size / steps)} a step"
        for kind, size in found
    ]
    return f"<table>{''.join(rows)}</table>"


def _ledger(run: Run) -> str:
    """A row for each class of time."""
    total = _total(run)
    if not total:
        return ""
    rows = [
        f'<tr><th>{name}<td class=wide><meter max="{total}" value="{seconds}"></meter>'
        f"<td>{_duration(seconds)}<td>{_share(seconds, total)}"
        for name, seconds in run.ledger.items()
        if seconds > 0
    ]
    note = f"<p>{_duration(total)} from the start of the first process to the last line of a step."
    return f"<table>{''.join(rows)}</table>{note}"


def _failures(run: Run) -> str:
    rows = [
        f"<tr><th>{_clock(each.time)}<td class=wide>{shown(each.text.partition(chr(10))[0], 300)}"
        f"<td>{sum(each.seconds.values()):.2f} s"
        f"<td>{', '.join(f'{name} {spent:.2f} s' for name, spent in each.seconds.items() if spent)}"
        for each in run.failures[-MOST_ROWS:]
    ]
    hidden = len(run.failures) - len(rows)
    more = f"<p>{hidden} earlier ones are not shown." if hidden else ""
    return f"<table>{''.join(rows)}</table>{more}" if rows else ""


def _experts(found: Experts) -> str:
    """A row for each layer, with a bar for each expert."""
    rows = []
    for layer in found.layers[:MOST_ROWS]:
        counts, total = layer.counts[:MOST_EXPERTS], sum(layer.counts)
        if not total:
            continue
        tall = max(layer.counts)
        bars = "".join(
            f'<rect x="{at}" y="{1 - count / tall:.3f}" width=".8" height="{count / tall:.3f}"/>'
            for at, count in enumerate(counts)
        )
        picture = (
            f'<svg class=a viewBox="0 0 {len(counts)} 1" preserveAspectRatio=none height=28>'
            f"<g class=fill>{bars}</g></svg>"
        )
        share = layer.dropped / (total + layer.dropped)
        rows.append(
            f"<tr><th>{shown(layer.name, 60)}<td class=wide>{picture}"
            f"<td>{tall * len(layer.counts) / total:.2f} x mean<td>{share:.1%} dropped"
        )
    hidden = len(found.layers) - MOST_ROWS
    more = f"<p>{hidden} more layers are not shown." if hidden > 0 else ""
    return f"<table>{''.join(rows)}</table>{more}" if rows else ""


def _events(run: Run) -> str:
    rows = []
    for each in run.events[-MOST_ROWS:]:
        if isinstance(each, Start):
            cell = shown(f"{each.ranks} ranks, restart {each.restart}", 100)
        else:
            cell = shown(each.path, 300) + (
                f"<pre>{shown(each.text, 1500)}</pre>" * bool(each.text)
            )
        mark = " class=bad" * (each.kind == "failure")
        rows.append(f"<tr><th>{_clock(each.time)}<td{mark}>{each.kind}<td class=wide>{cell}")
    hidden = len(run.events) - len(rows)
    more = f"<p>{hidden} earlier ones are not shown." if hidden else ""
    return f"<table>{''.join(rows)}</table>{more}"


def _versions(run: Run) -> str:
    start = run.start
    rows = [*start.versions.items()] if isinstance(start.versions, dict) else []
    rows += [("host", start.host), ("device", start.device), ("output of ranks", start.output)]
    cells = [f"<tr><th>{shown(key, 60)}<td>{shown(text, 300)}" for key, text in rows[:MOST_ROWS]]
    return f"<table>{''.join(cells)}</table>"


__all__ = ["STYLE", "page_of"]
