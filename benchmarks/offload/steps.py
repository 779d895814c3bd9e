"""`--steps`: the time of a step with offload against its bound, against no offload, and against DeepSpeed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import contestants
from ceilings import measure, summary
from child import ChildFailed, results_of
from contestants import BARE, CLIP, DEEPSPEED, GUESS, NONE, WAIT, Case
from roofline import Bound, Ceilings, Compute, bound
from scale import Scale

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from harness import Row  # noqa: E402

CEILING_SECONDS = 90
CASE_SECONDS = 150  # a peer that hangs, such as in compiling, must not use up the time of all
BEATEN = 1.05  # a share above it is impossible, but for noise
NEAR_LIMIT = 0.8  # of the clipping limit: above it super_offload waits
ORDER = (  # the most important first: a deadline cuts the end
    Case("1.5B", 0, BARE),
    Case("1.5B", 2, NONE),
    Case("1.5B", 3, GUESS),
    Case("1.5B", 2, GUESS),
    Case("1.5B", 2, DEEPSPEED),
    Case("6.7B", 0, BARE),
    Case("6.7B", 3, GUESS),
    Case("1.5B", 3, WAIT),
    Case("2.7B", 0, BARE),
    Case("2.7B", 3, GUESS),
    Case("2.7B", 2, GUESS),
    Case("6.7B", 3, WAIT),
    Case("2.7B", 2, DEEPSPEED),
    Case("1.5B", 2, WAIT),
    Case("6.7B", 3, DEEPSPEED),
    Case("1.5B", 3, DEEPSPEED),
    Case("2.7B", 3, WAIT),
    Case("2.7B", 2, WAIT),
    Case("2.7B", 3, DEEPSPEED),
)
OFFLOADED = [case for case in ORDER if case.kind in (GUESS, WAIT)]
Key = tuple[Case, str]  # and the name of the number of tokens


class Results:
    """What has been measured, and why the rest has not."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.ceilings: Ceilings | None = None
        self.found: dict[Key, dict[str, Any]] = {}
        self.reasons: dict[Case, str] = {}

    def rows(self) -> list[Row]:
        """Every row of the table; those without a figure say why."""
        found = []
        for tokens in self.scale.tokens:
            for case in OFFLOADED:
                found += [self._bound_row(case, tokens), *self._share_rows(case, tokens)]
                if case.kind == GUESS:
                    found.append(self._peer_row(case, tokens))
        return found

    def _bound_row(self, case: Case, tokens: str) -> Row:
        name = f"bound / step, {case.size}, {tokens} tokens, {case.label}"
        row = Row(name, must=0.80, aim=0.90, more_is_better=True)
        bare = Case(case.size, 0, BARE)
        if self.ceilings is None:
            return _void(row, self.reasons.get(bare, "the ceilings"))
        if (reason := self._reason(tokens, bare, case)) is not None:
            return _void(row, reason)
        step, limit = self.found[case, tokens], self._bound(case, tokens)
        _fill(row, [limit.least / seconds for seconds in step["seconds"]])
        seconds = median(step["seconds"])
        row.note = f"step {seconds:.3f} s, {limit.note()}"
        if case.kind == WAIT:
            row.note += f"; the least time that waits for the norm {limit.wait:.3f} s"
        if case.kind == GUESS:
            row.note += f"; {step['guesses']} updates during backward counted"
        row.note += f"; at most {step['peak_bytes'] / 1e9:.1f} GB of the device"
        teraflops = self.found[bare, tokens]["flops"] / seconds / 1e12
        row.note += f"; {teraflops:.0f} TFLOP/s without recomputation"
        if row.value is not None and row.value > BEATEN:
            row.void = "VOID (faster than its bound, so the bound is wrong)"
        if step["norm"] >= NEAR_LIMIT * CLIP:
            row.void = f"VOID (the norm, {step['norm']:.0f}, is near the clipping limit)"
        return row

    def _share_rows(self, case: Case, tokens: str) -> list[Row]:
        """The share of the speed without offload, which one size is measured for."""
        plain = Case(case.size, 2, NONE)
        if plain not in ORDER:
            return []
        row = Row(f"no offload / step, {case.size}, {tokens} tokens, {case.label}")
        row.more_is_better = True
        if tokens == "32k":
            row.must, row.aim = 0.60, 0.85
        return [self._ratio(row, plain, case, tokens)]

    def _peer_row(self, case: Case, tokens: str) -> Row:
        peer = case._replace(kind=DEEPSPEED)
        row = Row(f"DeepSpeed ZeRO-Offload / step, {case.size}, {tokens} tokens, {case.label}")
        row.must, row.aim, row.more_is_better = 1.5, 2.0, True
        return self._ratio(row, peer, case, tokens)

    def _ratio(self, row: Row, top: Case, case: Case, tokens: str) -> Row:
        if (reason := self._reason(tokens, top, case)) is not None:
            return _void(row, reason)
        above = median(self.found[top, tokens]["seconds"])
        row.note = f"{above:.3f} s over {median(self.found[case, tokens]['seconds']):.3f} s"
        return _fill(row, [above / each for each in self.found[case, tokens]["seconds"]])

    def _reason(self, tokens: str, *cases: Case) -> str | None:
        """Why a row of `cases` has no figure; None if it has one."""
        for case in cases:
            if (case, tokens) not in self.found:
                return self.reasons.get(case, "not run yet")
        return None

    def _bound(self, case: Case, tokens: str) -> Bound:
        assert self.ceilings is not None
        bare = self.found[Case(case.size, 0, BARE), tokens]
        forward = bare["forward"]
        compute = Compute(forward, median(bare["seconds"]) - forward)
        numel = self.scale.models[case.size].numel
        return bound(numel, compute, self.ceilings, params_on_host=case.params_on_host)


def not_measured(scale: Scale, reason: str) -> list[Row]:
    """All rows, without figures."""
    results = Results(scale)
    results.reasons = dict.fromkeys(ORDER, reason)
    return results.rows()


def measured(scale: Scale, *, until: float) -> Iterator[Row]:
    """Rows as soon as all that they compare has been measured; at the end those without figures."""
    results, shown = Results(scale), set()
    try:
        samples = {
            each["name"]: each
            for each in measure(scale, None, until=min(until, time.monotonic() + CEILING_SECONDS))
        }
        results.ceilings = summary(samples)
    except ChildFailed as error:
        yield Row("ceilings", void="FAIL", note=str(error))
    for case in ORDER:
        if reason := contestants.missing(case.kind):
            results.reasons[case] = reason
            continue
        try:
            end = min(until, time.monotonic() + CASE_SECONDS)
            for found in results_of(contestants.run, case, scale, until=end):
                results.found[case, found["tokens"]] = found
                for row in results.rows():
                    if row.value is not None and row.name not in shown:
                        shown.add(row.name)
                        yield row
        except ChildFailed as error:
            results.reasons[case] = str(error)
    yield from (row for row in results.rows() if row.name not in shown)


def _fill(row: Row, samples: list[float]) -> Row:
    row.value, row.low, row.high = median(samples), min(samples), max(samples)
    row.samples = {"ratios": samples}
    return row


def _void(row: Row, reason: str) -> Row:
    row.void, row.note = "not measured", reason
    return row


__all__ = ["ORDER", "Results", "measured", "not_measured"]
