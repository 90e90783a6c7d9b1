"""``tidegate profile MODEL``: how long steps take on this device, more finely than a server measures at its start."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.node.client import ENVIRONMENT
from tidegate.node.config import EngineConfig
from tidegate.slo.latency import LatencyModel, Sample

Progress = Callable[[str, float], None]


def add_profile(command: argparse.ArgumentParser) -> None:
    """The flags besides those that an engine has."""
    group = command.add_argument_group("profile")
    group.add_argument(
        "--seconds", type=float, default=120.0, metavar="S", help="to measure for, once the lanes are up (default: 120)"
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="for serve's --latency-model")
    group.add_argument("--samples", type=Path, metavar="FILE", help="each measured step, one JSON object a line")


def profile(config: EngineConfig, seconds: float, out: Path | None, samples: Path | None, progress: Progress) -> str:
    """Measures, keeps the model for the next start, writes what is asked for; returns a report for people."""
    os.environ.update(ENVIRONMENT | os.environ)
    from tidegate.models.sources import open_model  # torch, which a command line does without
    from tidegate.node import latency_cache
    from tidegate.node.backend import make_backend
    from tidegate.node.predictions import Subject
    from tidegate.policy.modes import MODES

    if seconds <= 0:
        raise ConfigError("--seconds must be above 0")
    mode = MODES[config.mode]
    source = open_model(config.model, config.load_format, config.seed)
    backend = make_backend(config, source, progress)
    subject = Subject(config, mode, source.spec, backend.size_pool(config), backend)
    try:
        lanes = backend.open(mode.lanes, progress)
        calibration, measured = subject.calibrate(lanes, seconds, progress, fine=True)
    finally:
        backend.close()
    latency_cache.keep(subject.key, measured)
    written = [latency_cache.path_of(subject.key)]
    if out is not None:
        latency_cache.write(out, subject.key, measured)
        written.append(out)
    if samples is not None:
        labelled = [("fitted", calibration.samples), ("other", calibration.unseen)]
        samples.write_bytes(b"".join(line for use, those in labelled for line in _lines(use, those, measured.model)))
        written.append(samples)
    rows = [f"{'kind of step':<16}{'steps':>7}{'p50':>8}{'p95':>8}   relative error of the prediction"]
    rows += [f"{k:<16}{e.steps:>7}{e.p50:>8.1%}{e.p95:>8.1%}" for k, e in measured.by_kind.items()]
    return "\n".join([str(measured), "", *rows, "", *(f"written: {path}" for path in written)])


def _lines(use: str, samples: list[Sample], model: LatencyModel) -> Iterator[bytes]:
    for s in samples:
        row = msgspec.to_builtins(s) | {
            "work": s.work._asdict(),
            "predicted": model.seconds(s.work, s.lane, s.share, s.beside),
            "use": use,
        }
        yield msgspec.json.encode(row) + b"\n"
