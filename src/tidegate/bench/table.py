"""Results as text for people. Times in milliseconds."""

from collections.abc import Sequence

from tidegate.bench.report import Distribution, Goodput, PromptQuartile, RunResult
from tidegate.slo.goodput import Metric, Slo

_PACE = {Metric.TPOT: "TPOT", Metric.GAP: "p99 gap"}


def run_text(run: RunResult) -> str:
    """One run: a block of lines."""
    title = f"{rate_text(run.offered_rate)}: {run.requests} requests in {run.duration_s:.1f} s, {run.failed} failed"
    lines = [
        f"── {title} ".ljust(78, "─"),
        f"{run.completed_per_s:.2f} requests/s · {run.input_tokens_per_s:,.0f} input tokens/s"
        f" · {run.output_tokens_per_s:,.0f} output tokens/s",
        f"{'ms':<22}{'mean':>11}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}",
    ]
    rows = {
        "TTFT": run.ttft,
        "TPOT (mean gap)": run.tpot,
        "gaps between tokens": run.gap,
        "p99 gap of a request": run.gap_p99,
        "end to end": run.end_to_end,
    }
    if run.turn_wait is not None and run.turn_wait.max >= 0.001:
        rows["wait for a place"] = run.turn_wait
    lines += [_row(name, values) for name, values in rows.items() if values is not None]
    for found in run.attainments:
        line = f"{slo_text(found.slo):<38}{found.attainment:>7.1%}"
        if found.by_prompt:
            line += f"  by prompt: {quartiles_text(found.by_prompt)}"
        lines.append(line)
    return "\n".join(lines + notes(run))


def notes(run: RunResult) -> list[str]:
    """What a reader must know to trust the numbers of a run."""
    check = run.token_check
    lines = [f"failed: {count} × {kind}: {run.failure_messages[kind]}" for kind, count in sorted(run.failures.items())]
    answered = run.requests - run.failed
    if check.differing:
        lines.append(
            f"note: {check.differing} of {answered} answers had other numbers of events than of tokens "
            f"({check.events:,} and {check.tokens:,} in all): their gaps are between events."
        )
    if check.counted < answered:
        lines.append(f"note: the server counted the tokens of {check.counted} of {answered} answers only.")
    lines += [f"WARNING: {warning}" for warning in run.warnings]
    own = run.own_load
    lines.append(
        f"client: {own.cpu_share:.0%} of a core, sent at most {own.late_max_s * 1e3:.1f} ms late, "
        f"loop lag p99 {own.lag_p99_s * 1e3:.1f} ms"
    )
    return lines


def sweep_text(runs: Sequence[RunResult], goodputs: Sequence[Goodput]) -> str:
    """Several runs side by side, a row each, and the goodput under each SLO."""
    lines = [
        f"{'requests/s':>10} {'done/s':>8} {'failed':>6} {'out tok/s':>9}"
        f" {'TTFT p50':>9} {'p90':>7} {'p99':>7} {'TPOT p50':>9} {'p90':>7} {'p99':>7} {'p99 gap p90':>12}",
    ]
    for run in runs:
        rate = "all" if run.offered_rate is None else f"{run.offered_rate:g}"
        lines.append(
            f"{rate:>10} {run.completed_per_s:>8.2f} {run.failed:>6} {run.output_tokens_per_s:>9,.0f}"
            f" {ms(run.ttft, 'p50'):>9} {ms(run.ttft, 'p90'):>7} {ms(run.ttft, 'p99'):>7}"
            f" {ms(run.tpot, 'p50', 1):>9} {ms(run.tpot, 'p90', 1):>7} {ms(run.tpot, 'p99', 1):>7}"
            f" {ms(run.gap_p99, 'p90', 1):>12}"
        )
    for found in goodputs:
        attained = " ".join(f"{run.attained(found.slo):.1%}" for run in runs if run.offered_rate is not None)
        bound = "≥ " if found.lower_bound else ""
        lines.append(f"goodput {slo_text(found.slo):<38} {bound}{found.requests_per_s:.2f} requests/s ({attained})")
    return "\n".join(lines)


def rate_text(rate: float | None) -> str:
    return "all at once" if rate is None else f"{rate:.4g} requests/s"


def slo_text(slo: Slo) -> str:
    return f"TTFT ≤ {slo.ttft_s * 1e3:g} ms, {_PACE[slo.metric]} ≤ {slo.tpot_s * 1e3:g} ms"


def _row(name: str, values: Distribution) -> str:
    numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
    return f"{name:<22}" + "".join(f"{value * 1e3:>11,.1f}" for value in numbers)


def quartiles_text(quartiles: Sequence[PromptQuartile]) -> str:
    """The longest prompt of each quarter, and how many of its requests attain the SLO."""
    return " · ".join(f"≤{quartile.to_tokens:,} {quartile.attainment:.0%}" for quartile in quartiles)


def ms(values: Distribution | None, name: str, digits: int = 0) -> str:
    """One number of a distribution, or a dash."""
    return "-" if values is None else f"{getattr(values, name) * 1e3:,.{digits}f}"
