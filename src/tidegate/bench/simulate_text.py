"""Simulated results as text for people. Times in milliseconds."""

from collections.abc import Sequence

from tidegate.bench.table import slo_text
from tidegate.sim.outcome import Outcome, Percentiles
from tidegate.slo.goodput import Slo


def outcome_text(title: str, found: Outcome, slo: Slo, goodput: float | None) -> str:
    """One simulation: a block of lines."""
    lines = [
        f"── {title} ".ljust(78, "─"),
        f"{found.requests:,} requests in {found.seconds:,.1f} s, {found.failed} failed, {found.preemptions} preemptions"
        f" · {found.requests_per_s:.2f} requests/s · {found.output_tokens_per_s:,.0f} output tokens/s",
        f"{slo_text(slo):<38}{found.attainment:>7.1%}",
        f"{'ms':<22}{'p50':>11}{'p90':>11}{'p99':>11}",
    ]
    rows = {"TTFT": found.ttft, "TPOT (mean gap)": found.tpot, "p99 gap of a request": found.gap_p99}
    lines += [_row(name, values) for name, values in rows.items() if values is not None]
    if found.by_prompt:
        parts = (
            f"≤{part.to_tokens:,} {part.attainment:.0%}"
            + (f" (TTFT p90 {part.ttft_p90_s * 1e3:,.0f})" if part.ttft_p90_s is not None else "")
            for part in found.by_prompt
        )
        lines.append("by prompt: " + " · ".join(parts))
    busy = " · ".join(f"{lane} {share:.0%}" for lane, share in found.busy.items())
    lines.append(f"busy: {busy} · both lanes at once {found.beside:.0%}")
    lines.append("of the busy time: " + " · ".join(f"{what} {share:.0%}" for what, share in found.spent.items()))
    if found.choices:
        choices = " · ".join(f"{name} {share:.0%}" for name, share in found.choices.items())
        lines.append(f"gate: {choices} · {found.moves} moves")
    if goodput is not None:
        lines.append(f"goodput {goodput:.2f} requests/s" if goodput else "goodput: none of the rates tried attains it")
    return "\n".join(lines)


def sweep_text(results: Sequence[tuple[str, Outcome, float | None]], slo: Slo) -> str:
    """Several simulations, a row each: titles, outcomes and goodputs."""
    width = max(len(title) for title, _, _ in results)
    lines = [
        slo_text(slo),
        f"{'':<{width}} {'attained':>8} {'goodput':>8} {'TTFT p50':>9} {'p90':>7} {'p99':>7} {'TPOT p50':>9} {'p90':>7}"
        f" {'p99 gap p90':>12} {'both':>5} {'moves':>6}  by prompt length",
    ]
    for title, found, goodput in results:
        lines.append(
            f"{title:<{width}} {found.attainment:>8.1%} {'-' if goodput is None else f'{goodput:.2f}':>8}"
            f" {_ms(found.ttft, 'p50'):>9} {_ms(found.ttft, 'p90'):>7} {_ms(found.ttft, 'p99'):>7}"
            f" {_ms(found.tpot, 'p50', 1):>9} {_ms(found.tpot, 'p90', 1):>7} {_ms(found.gap_p99, 'p90', 1):>12}"
            f" {found.beside:>5.0%} {found.moves:>6}  {_quartiles(found)}".rstrip()
        )
    return "\n".join(lines)


def _quartiles(found: Outcome) -> str:
    """The longest prompt of each quarter, and how many of its requests attain the SLO."""
    return " · ".join(f"≤{part.to_tokens:,} {part.attainment:.0%}" for part in found.by_prompt)


def _row(name: str, values: Percentiles) -> str:
    return f"{name:<22}" + "".join(f"{value * 1e3:>11,.1f}" for value in (values.p50, values.p90, values.p99))


def _ms(values: Percentiles | None, name: str, digits: int = 0) -> str:
    return "-" if values is None else f"{getattr(values, name) * 1e3:,.{digits}f}"
