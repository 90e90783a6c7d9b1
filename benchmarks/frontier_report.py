"""What a device offers to prefill and decode that share it: a table, a JSON file and a picture of measured points."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """``way``: "hybrid" (a chunk in the decode step) or a form of sharing; ``setting``: tokens of the chunk, or SMs of
    prefill."""

    context: int
    way: str
    setting: int
    decode_sms: int
    decode_ms: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Limits:
    """Each phase alone on the whole device."""

    context: int
    decode_ms: float
    prefill_tokens_per_s: float


def line(point: Point) -> str:
    what = f"{point.setting} tokens" if point.way == "hybrid" else f"{point.setting} + {point.decode_sms} SMs"
    return (
        f"{point.context:>7} {point.way:<9} {what:<14} {point.decode_ms:7.2f} ms {point.prefill_tokens_per_s:9,.0f} t/s"
    )


def save(file: Path, about: dict[str, Any], limits: list[Limits], points: list[Point]) -> None:
    content = {"schema": SCHEMA, **about, "limits": [asdict(x) for x in limits], "points": [asdict(x) for x in points]}
    file.write_text(json.dumps(content, indent=1) + "\n")


def plot(file: Path, title: str, limits: list[Limits], points: list[Point]) -> None:
    """One panel a context; up and to the left is better."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = (5 * len(limits) + 1.5, 4.4)
    figure, panels = plt.subplots(1, len(limits), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, limit in zip(panels[0], limits, strict=True):
        panel.axvline(limit.decode_ms, color="0.6", linestyle=":", label="decode alone")
        panel.axhline(limit.prefill_tokens_per_s / 1e3, color="0.6", linestyle="--", label="prefill alone")
        here = [point for point in points if point.context == limit.context]
        for way in dict.fromkeys(point.way for point in here):
            of_way = sorted((p.decode_ms, p.prefill_tokens_per_s / 1e3) for p in here if p.way == way)
            panel.plot(*zip(*of_way, strict=True), marker="o", markersize=4, label=way)
        panel.set_title(f"context {limit.context}")
        panel.set_xlabel("decode step (ms)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("prefill (thousand tokens/s)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
