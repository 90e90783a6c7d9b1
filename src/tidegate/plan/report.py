"""A plan for people: a table, the reasons, and the commands."""

from tidegate.plan.mixed import Mixed
from tidegate.plan.summary import Row, Summary
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, Metric, Slo

SHOWN = 10  # candidates, unless all are asked for
FEW = 6  # those far behind are shown only where there would be fewer lines
ALIKE = 0.02  # of goodput: a difference that says nothing


def text(plan: Summary, everything: bool) -> str:
    return "\n".join([*_head(plan), "", *_table(plan, everything), "", *reasons(plan), "", *_commands(plan)])


def slo_text(slo: Slo) -> str:
    pace = "every gap" if slo.metric is Metric.GAP else "TPOT"
    return f"TTFT ≤ {slo.ttft_s * 1e3:g} ms, {pace} ≤ {slo.tpot_s * 1e3:g} ms"


def _head(plan: Summary) -> list[str]:
    by = "measured" if plan.measured_latency else "from the roofline"
    return [
        f"{plan.model} on {plan.gpus} × {plan.gpu}, latencies {by}",
        f"workload {plan.workload}: {plan.prompt_tokens:,.0f} tokens in and {plan.output_tokens:,.0f} out on average;"
        f" {slo_text(plan.slo)} for {GOODPUT_ATTAINMENT:.0%} of the requests",
    ]


def _table(plan: Summary, everything: bool) -> list[str]:
    rows = plan.rows if everything else plan.rows[:SHOWN]
    names = [*map(_design, rows), *(name for name, _ in plan.passed_over), *plan.unreachable]
    width = max(map(len, names))
    lines = [
        "goodput in requests/s per GPU (95 %: where it lies, by chance alone)",
        f"{'design':<{width}} {'goodput':>8} {'95 %':>13} {'of bound':>8} {'mean TTFT':>10} {'TPOT':>8} "
        f"{'KV left':>11}",
    ]
    for row in rows:
        between = f"{row.low_per_gpu:.2f}–{row.high_per_gpu:.2f}"
        lines.append(
            f"{_design(row):<{width}} {row.goodput_per_gpu:>8.2f} {between:>13}"
            f" {row.goodput_per_gpu / plan.bound_per_gpu:>8.0%} {row.ttft_s * 1e3:>7.0f} ms {row.tpot_s * 1e3:>5.1f} ms"
            f" {row.kv_left_tokens:>11,}"
        )
    behind = sorted(plan.passed_over, key=lambda pair: pair[1], reverse=True)
    behind = behind if everything else behind[: max(0, FEW - len(rows))]
    lines += [f"{name:<{width}} below {rate:.2f}" for name, rate in behind]
    if everything:
        lines += [f"{name:<{width}} {'0.00':>8} can't meet the SLO at any rate" for name in plan.unreachable]
    else:
        left = len(plan.rows) - len(rows) + len(plan.passed_over) - len(behind) + len(plan.unreachable)
        if left:
            lines.append(f"and {left} more, none better: --all lists them")
    return lines


def _design(row: Row) -> str:
    return row.design + (f" × {row.copies}" if row.copies > 1 else "")


# ---- reasons


def reasons(plan: Summary) -> list[str]:
    """What bounds the hardware and the winner, and what the others lose."""
    winner = plan.winner
    lines = [
        f"Bound: a request takes {plan.compute_s * 1e3:.1f} ms of a GPU's arithmetic and "
        f"{plan.bandwidth_s * 1e3:.1f} ms of its memory's bandwidth; {plan.bound_by} binds, so no design passes "
        f"{plan.bound_per_gpu:.1f} requests/s per GPU.",
        f"Winner: {_design(winner)} gets {winner.goodput_per_gpu / plan.bound_per_gpu:.0%} of that; {_limit(winner)}.",
    ]
    other = next((row for row in plan.rows[1:] if row.family != winner.family), None)
    if other is not None:
        lines.append(f"{_design(other)} {_compared(other, winner)}; {_limit(other)}.")
    families = {winner.family, other.family} if other is not None else {winner.family}
    split = next((row for row in plan.rows if row.family.startswith("split") and row.family not in families), None)
    if split is not None and plan.transfer_s is not None:
        lines.append(
            f"{_design(split)} {_compared(split, winner)}; the KV of an average prompt takes "
            f"{plan.transfer_s * 1e3:.1f} ms over the link."
        )
    return lines


def _compared(row: Row, winner: Row) -> str:
    less = 1.0 - row.goodput_per_gpu / winner.goodput_per_gpu
    if abs(less) < ALIKE:
        return "does as well"
    overlap = ", which may be chance" if row.high_per_gpu > winner.low_per_gpu else ""
    return f"gets {abs(less):.0%} {'less' if less > 0 else 'more'}{overlap}"


def _limit(row: Row) -> str:
    """What gives way first above the goodput."""
    if row.family == Mixed.family:
        return "its parts have the limits that they have alone"
    kv_full = row.kv_left_tokens < 0.1 * row.kv_tokens
    memory = ", with its KV cache full" if kv_full else ""
    missed = max(row.missed_ttft, row.missed_tpot)
    if missed <= 1.0 - GOODPUT_ATTAINMENT:
        return f"more than that and work piles up{memory}"
    if row.missed_ttft > 2 * row.missed_tpot:
        return f"above it prompts wait too long: {row.missed_ttft:.0%} miss the limit on TTFT{memory}"
    if row.missed_tpot > 2 * row.missed_ttft:
        return f"above it tokens come too slowly: {row.missed_tpot:.0%} miss the limit on TPOT{memory}"
    return f"above it {row.missed_ttft:.0%} miss the limit on TTFT and {row.missed_tpot:.0%} that on TPOT{memory}"


# ---- commands


def _commands(plan: Summary) -> list[str]:
    winner = plan.winner
    if winner.runnable:
        return _started(winner)
    lines = [f"planned: this version does not serve {_design(winner)} yet. It will be started as", *_indented(winner)]
    now = next((row for row in plan.rows if row.runnable), None)
    if now is None:
        return [*lines, "nothing among the candidates runs in this version, which serves one device an engine."]
    return [*lines, f"the best that this version runs is {_design(now)}, {_compared(now, winner)}:", *_indented(now)]


def _started(row: Row) -> list[str]:
    copies = f", on each of {row.copies} GPUs (CUDA_VISIBLE_DEVICES), behind a load balancer" if row.copies > 1 else ""
    return [f"start it with{copies}:", *_indented(row)]


def _indented(row: Row) -> list[str]:
    return ["    " + command for command in row.commands]
