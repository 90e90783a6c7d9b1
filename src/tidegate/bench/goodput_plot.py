"""Attainment against rate as a picture, with the goodput of each setting. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from tidegate.bench.plot import load_matplotlib
from tidegate.bench.probe import Judging
from tidegate.bench.sweep import Row, State
from tidegate.bench.table import slo_text


def plot_goodput(rows: Sequence[Row], judging: Judging, title: str, path: Path) -> None:
    """A panel for each SLO, in it a line for each setting that was probed, with the intervals of its probes."""
    count = len(judging.slos)
    figure = load_matplotlib().Figure(figsize=(7 * count, 4.8), layout="constrained")
    figure.suptitle(title)
    for axes, slo in zip(figure.subplots(1, count, squeeze=False)[0], judging.slos, strict=True):
        axes.axhline(judging.threshold, color="grey", linestyle=":", label=f"{judging.threshold:.0%} of requests")
        for number, row in enumerate(row for row in rows if row.probes):
            color = f"C{number % 10}"
            probes = sorted(row.probes, key=lambda probe: probe.rate)
            intervals = [probe.verdict(slo).interval for probe in probes]
            attained = [interval.attainment for interval in intervals]
            below = [max(0.0, interval.attainment - interval.low) for interval in intervals]
            above = [max(0.0, interval.high - interval.attainment) for interval in intervals]
            rates = [probe.rate for probe in probes]
            found = next((found for found in row.found if found.slo == slo and row.state is not State.CUT_OFF), None)
            label = row.name or "attainment"
            if row.state is State.CUT_OFF:
                label += " (cut off)"
            if found is not None:
                label += f": {found.requests_per_s:.3g}/s"
                axes.plot(
                    found.requests_per_s, judging.threshold, marker="D", markersize=9, color=color, markeredgecolor="k"
                )
            axes.errorbar(rates, attained, yerr=(below, above), marker="o", capsize=3, color=color, label=label)
        axes.set(title=slo_text(slo), xlabel="requests/s", ylabel="attainment", ylim=(-0.03, 1.03))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
