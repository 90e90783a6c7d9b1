"""A search for goodput as text for people. Times in milliseconds."""

from collections.abc import Sequence

from tidegate.bench.goodput import Found
from tidegate.bench.load import ABANDONED
from tidegate.bench.probe import Judging, Probe, Verdict
from tidegate.bench.sweep import Row, State, best_row
from tidegate.bench.table import ms, quartiles_text, slo_text

HEADER = (
    f"{'requests/s':>10} {'attained':>8} {'interval':>13} {'':>9} {'requests':>8} {'failed':>6}"
    f" {'TTFT p50':>9} {'p90':>7} {'p99':>7} {'TPOT p50':>9} {'p90':>7} {'p99 gap p90':>12}  by prompt length"
)


def probe_text(probe: Probe) -> str:
    """A row under HEADER, for the SLO that the probe was to decide on, and what a reader must know of it."""
    run, verdict = probe.run, probe.verdicts[probe.goal]
    lines = [
        f"{probe.rate:>10.4g} {_verdict(verdict)} {run.requests:>8} {failed(probe):>6}"
        f" {ms(run.ttft, 'p50'):>9} {ms(run.ttft, 'p90'):>7} {ms(run.ttft, 'p99'):>7}"
        f" {ms(run.tpot, 'p50', 1):>9} {ms(run.tpot, 'p90', 1):>7} {ms(run.gap_p99, 'p90', 1):>12}"
        f"  {quartiles_text(verdict.by_prompt)}".rstrip()
    ]
    for other in probe.verdicts:
        if other is not verdict:
            lines.append(
                f"{'':>10} {_verdict(other)}  {slo_text(other.slo)}  {quartiles_text(other.by_prompt)}".rstrip()
            )
    for kind, count in sorted(run.failures.items()):
        if kind != ABANDONED.kind:
            lines.append(f"{'':>10} failed: {count} × {kind}: {run.failure_messages[kind]}")
    if not probe.drained:
        lines.append(f"{'':>10} WARNING: The server was still busy when the next requests were due (see --drain).")
    lines += [f"{'':>10} WARNING: {warning}" for warning in run.warnings]
    return "\n".join(lines)


def failed(probe: Probe) -> int:
    """Requests; not those that were abandoned."""
    return probe.run.failed - probe.run.failures.get(ABANDONED.kind, 0)


def found_text(found: Found, judging: Judging) -> str:
    """One sentence."""
    line = f"goodput {slo_text(found.slo):<38} {_number(found)} requests/s ({_between(found)}"
    if found.undecided:
        rates = " and ".join(f"{rate:.4g}" for rate in found.undecided)
        line += f"; not decided with {judging.confidence:.0%} confidence at {rates}"
    return line + ")"


def sweep_text(rows: Sequence[Row]) -> str:
    """A row for each combination: its goodput under the first SLO."""
    width = max(len("setting"), *(len(row.name) for row in rows))
    lines = [f"{'setting':<{width}} {'goodput':>8} {'attained at':>11} {'missed at':>9} {'probes':>6}"]
    for row in rows:
        lines.append(f"{row.name:<{width}} {_row(row)}".rstrip())
    best = best_row(rows)
    if best is not None:
        lines.append(f"best: {best.name}: {_number(best.found[0])} requests/s under {slo_text(best.found[0].slo)}")
    return "\n".join(lines)


def _row(row: Row) -> str:
    probes = f"{len(row.probes):>6}"
    if row.state is State.CUT_OFF:
        rate = row.probes[0].rate
        return f"{f'< {rate:.4g}':>8} {'':>11} {rate:>9.4g} {probes}  cut off: far below the best so far"
    if row.state is State.REFUSED:
        return f"{'-':>8} {'':>11} {'':>9} {probes}  refused: {row.note}"
    if not row.found:
        return f"{'-':>8} {'':>11} {'':>9} {probes}  {row.state}"
    found = row.found[0]
    high = "" if found.high is None else f"{found.high:.4g}"
    note = "" if row.state is State.MEASURED else f"  {row.state}"
    if row.state is State.SAME:
        note += f" as {row.note}"
    elif found.undecided:
        note += f"  not decided at {' and '.join(f'{rate:.4g}' for rate in found.undecided)}"
    return f"{_number(found):>8} {found.low:>11.4g} {high:>9} {probes}{note}"


def _number(found: Found) -> str:
    if found.high is None:
        return f"≥ {found.low:.4g}"
    return f"{found.requests_per_s:.4g}" if found.low else f"< {found.high:.4g}"


def _between(found: Found) -> str:
    if found.high is None:
        return f"attained at {found.low:.4g}, the highest rate tried"
    if not found.low:
        return f"missed at {found.high:.4g}, the lowest rate tried"
    return f"attained at {found.low:.4g}, missed at {found.high:.4g}"


def _verdict(verdict: Verdict) -> str:
    interval = verdict.interval
    return f"{interval.attainment:>8.1%} {f'{interval.low:.1%}–{interval.high:.1%}':>13} {verdict.decision:<9}"
