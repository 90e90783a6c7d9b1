"""What a server did, from the log of its core (`tidegate serve … --record FILE`), a block for each stretch between two
changes of mode or settings:

    python benchmarks/served_log.py FILE

- the part of the requests that attained the SLO in force, in all and by quarters of the prompts, by length (times are
  the core's: a client sees tokens up to a few ms apart);
- gaps between a request's tokens;
- how long batches took on the device, by lane and kind, and how long a lane was idle between two batches of which the
  second was launched before the first ended.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tidegate.base.batch import Batch
from tidegate.base.events import Arrived, BatchDone, Emit, Launch, ModeSet, Resize, Tuned
from tidegate.core.config import CoreConfig, tuned
from tidegate.core.record import Entry, read_log
from tidegate.slo.accuracy import kind_of
from tidegate.slo.goodput import Latency, Metric, Slo, attainment, gaps_s, percentile, quarters
from tidegate.slo.latency import Work
from tidegate.slo.parse import parse_slo


class Stretch:
    """From one change to the next."""

    def __init__(self, began_s: float, config: CoreConfig) -> None:
        self.began_s, self.config, self.moves = began_s, config, 0
        self.arrived: dict[str, tuple[float, int]] = {}  # when, and the prompt's tokens
        self.times: dict[str, list[float]] = defaultdict(list)  # of the tokens of each of these requests
        self.took: dict[tuple[str, str], list[float]] = defaultdict(list)  # seconds, by lane and kind
        self.idle: dict[str, list[float]] = defaultdict(list)  # seconds, by lane


class Reader:
    """Reads a log's entries in order."""

    def __init__(self, config: CoreConfig) -> None:
        self.stretches = [Stretch(0.0, config)]
        self._of: dict[str, Stretch] = {}  # where a request arrived
        self._batches: dict[tuple[str, int], tuple[Batch, bool]] = {}  # in flight: each, and whether another was
        self._ended_s: dict[str, float] = {}  # a lane's last batch

    def read(self, entry: Entry) -> None:
        now, event, stretch = entry.now, entry.event, self.stretches[-1]
        match event:
            case Tuned():
                self.stretches.append(Stretch(now, tuned(stretch.config, event)))
            case ModeSet():
                self.stretches.append(Stretch(now, msgspec.structs.replace(stretch.config, mode=event.mode)))
            case Arrived():
                stretch.arrived[event.request.id] = now, len(event.request.prompt)
                self._of[event.request.id] = stretch
            case BatchDone():
                self._done(event, now)
        for action in entry.actions:
            match action:
                case Launch():
                    behind = any(lane == action.lane for lane, _ in self._batches)
                    self._batches[action.lane, action.batch.id] = action.batch, behind
                case Resize():
                    stretch.moves += 1
                case Emit():
                    for output in action.outputs:
                        if output.tokens and output.id in self._of:
                            self._of[output.id].times[output.id].append(now)

    def _done(self, event: BatchDone, now: float) -> None:
        batch, behind = self._batches.pop((event.lane, event.result.id))
        seconds, stretch = event.result.seconds, self.stretches[-1]
        stretch.took[event.lane, kind_of(Work.of(batch), beside=False)].append(seconds)
        if behind:
            stretch.idle[event.lane].append(max(0.0, now - seconds - self._ended_s[event.lane]))
        self._ended_s[event.lane] = now


def milliseconds(values: Sequence[float], *fractions: float) -> str:
    """Some percentiles, and the largest."""
    parts = [f"p{100 * fraction:g} {percentile(values, fraction) * 1e3:.2f}" for fraction in fractions]
    return ", ".join([*parts, f"at most {max(values) * 1e3:.2f} ms"])


def by_length(stretch: Stretch, slo: Slo) -> str:
    """Attainment by quarters of the prompts, and in all. A request without tokens has not attained it."""
    rows = []
    for name, (arrived_s, tokens) in stretch.arrived.items():
        times = stretch.times[name]
        rows.append((tokens, Latency.of(arrived_s, times) if times else None))
    parts = quarters(rows, lambda row: row[0])
    said = [f"<= {part[-1][0]:,} tokens: {attainment([of for _, of in part], slo):.0%}" for part in parts]
    return " · ".join([*said, f"all {len(rows)}: {attainment([of for _, of in rows], slo):.1%}"])


def report(stretch: Stretch, slo: Slo | None, until_s: float) -> Iterator[str]:
    config = stretch.config
    asked = slo or config.slo
    limits = f", TTFT {asked.ttft_s:g} s, {asked.metric} {asked.tpot_s:g} s" if asked else ""
    yield (
        f"{until_s - stretch.began_s:.1f} s of {config.mode}, gate {config.gate or 'its own'}, {config.order} first, "
        f"{config.max_num_batched_tokens} tokens{limits}; {stretch.moves} moves of the share"
    )
    if stretch.arrived and asked:
        yield f"  attained: {by_length(stretch, asked)}"
    if gaps := [gap for times in stretch.times.values() for gap in gaps_s(times)]:
        yield f"  {len(gaps):,} gaps: {milliseconds(gaps, 0.5, 0.9, 0.99, 0.999)}"
    for (lane, kind), seconds in sorted(stretch.took.items()):
        yield f"  {len(seconds):,} batches of {lane}, {kind}: {milliseconds(seconds, 0.5, 0.9, 0.99)}"
    for lane, seconds in sorted(stretch.idle.items()):
        yield f"  {lane} idle before a batch launched ahead: {milliseconds(seconds, 0.5, 0.99)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--slo", help="such as ttft=500ms,tpot=25ms (default: what was in force)")
    parser.add_argument("--slo-metric", choices=[str(metric) for metric in Metric], default=str(Metric.TPOT))
    parser.add_argument("--min-requests", type=int, default=1, help="of a stretch that is shown (default: 1)")
    arguments = parser.parse_args()
    slo = parse_slo(arguments.slo, Metric(arguments.slo_metric)) if arguments.slo else None
    config, entries = read_log(arguments.log)
    reader, last_s = Reader(config), 0.0
    for entry in entries:
        reader.read(entry)
        last_s = entry.now
    ends = [*(stretch.began_s for stretch in reader.stretches[1:]), last_s]
    for stretch, until_s in zip(reader.stretches, ends, strict=True):
        if len(stretch.arrived) >= arguments.min_requests:
            print("\n".join(report(stretch, slo, until_s)))


if __name__ == "__main__":
    main()
