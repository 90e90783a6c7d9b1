"""How well `tidegate simulate` predicts a server: each case is measured on a live one, and simulated with its own
latency model, its settings and the same requests.

    tidegate serve smollm2 --quantization int8 --mode auto --slo ttft=2s,tpot=60ms --no-enable-prefix-caching &
    python benchmarks/fidelity.py cpu --truth ~/.cache/tidegate/latency/*.json

The server is changed from case to case by its admin endpoints. A table, a line a case: measured / simulated as the
server has measured its device at its start / simulated as fast as the device was meanwhile, by what the server has
learned of its steps in the course of the case (the mean of `prediction_factors`, by kind of step). Then, of each
setting, the goodput that its rates give. `--measure FILE` writes what was measured, and needs no `--truth`; `--measured
FILE` simulates that, on any machine.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidegate.slo.goodput import goodput

LOOK_SECONDS = 0.5  # between two looks at what the server has learned


class Load(NamedTuple):
    workload: str
    seconds: int  # of arrivals
    slo: str
    host: tuple[Any, ...] = ()  # flags: what the host's work adds, where that is not what simulations take it to be


class Setting(NamedTuple):
    mode: str
    tokens: int  # --max-num-batched-tokens
    rates: tuple[float, ...]  # requests per second
    share: float | None = None  # of prefill

    def __str__(self) -> str:
        share = f" {self.share:.0%}" if self.share else ""
        return f"{self.mode}{share}, {self.tokens} tokens"


class Result(NamedTuple):
    """Seconds, but for the attainment."""

    attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    gap_p99_p50: float

    @classmethod
    def of(cls, attainment: float, found: dict[str, Any]) -> "Result":
        """From what `tidegate bench serve` or `tidegate simulate` writes."""
        ttft, tpot, gap_p99 = found["ttft"], found["tpot"], found["gap_p99"]
        return cls(attainment, ttft["p50"], ttft["p90"], tpot["p50"], gap_p99["p50"])


class Case(NamedTuple):
    """A setting at a rate, as it was measured."""

    setting: Setting
    load: list[str]  # flags
    device: list[str]  # flags by which a simulation has the server's pool and limits
    factors: dict[str, float]  # by kind of step
    found: Result


COLUMNS = ("attainment, %", "TTFT p50, ms", "TTFT p90, ms", "TPOT p50, ms", "p99 gap, p50, ms")
UNITS = (100.0, 1e3, 1e3, 1e3, 1e3)
# On two cores of an EPYC a step begins 0.6 ms after the end of the one before (median, by a log of `--record`).
LOADS = {
    "cpu": Load("chat", 90, "ttft=2s,tpot=60ms", ("--launch-ms", 0.6, "--lead-ms", 0)),
    "h200": Load("conv", 30, "ttft=500ms,tpot=25ms"),
}
SETTINGS = {
    "cpu": [
        Setting("auto", 2048, (0.9, 1.1, 1.3)), Setting("semi", 2048, (0.7, 0.9, 1.1), 0.5),
        Setting("chunked", 512, (0.7, 0.9, 1.1)), Setting("prefill-first", 2048, (0.7, 0.9, 1.1)),
    ],
    "h200": [
        Setting("auto", 8192, (26, 30, 34)), Setting("chunked", 512, (26, 30, 34)),
        Setting("semi", 8192, (17, 23), 0.667), Setting("prefill-first", 8192, (15, 20)),
        Setting("chunked", 1024, (18, 22)),
    ],
}  # fmt: skip


class Server:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request).close()

    def set(self, setting: Setting, slo: str) -> None:
        self.post("/admin/mode", {"mode": setting.mode})
        self.post("/admin/settings", {"max_num_batched_tokens": setting.tokens, "slo": slo, "order": "slack"})
        if setting.share is not None:
            self.post("/admin/shares", {"prefill": setting.share})

    def device(self) -> list[str]:
        """Flags by which a simulation has the same pool and limits."""
        info, stats = self.get("/admin/info"), self.get("/admin/stats")
        pool, limits = info["pool"], info["limits"]
        flags = [
            "--num-gpu-blocks-override", pool["num_blocks"], "--block-size", pool["block_size"],
            "--max-num-seqs", pool["max_num_seqs"], "--max-model-len", pool["max_model_len"],
            "--slice-ms", stats["slice_ms"], "--max-prefill-tokens", limits["max_prefill_tokens"],
            "--min-slice-tokens", limits["min_slice_tokens"], "--slice-quantum-tokens", limits["slice_quantum_tokens"],
        ]  # fmt: skip
        return [str(flag) for flag in flags]

    @contextlib.contextmanager
    def learning(self) -> Iterator[dict[str, float]]:
        """Afterwards it has the mean factor of each kind of step that there was."""
        seen: dict[str, list[float]] = defaultdict(list)
        means: dict[str, float] = {}
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                for kind, factor in self.get("/admin/stats")["prediction_factors"].items():
                    seen[kind].append(factor)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield means
        finally:
            over.set()
            looking.join()
            ran = {kind: factors for kind, factors in seen.items() if len(set(factors)) > 1}
            means |= {kind: statistics.fmean(factors) for kind, factors in ran.items()}


def tidegate(*arguments: Any) -> str:
    command = ("tidegate", *map(str, arguments))
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure(url: str, load: Load, settings: list[Setting], seed: int) -> Iterator[Case]:
    server = Server(url)
    for setting in settings:
        server.set(setting, load.slo)
        device = server.device()
        for rate in setting.rates:
            asked = ["--workload", load.workload, "--seconds", f"{load.seconds}", "--rate", f"{rate:g}"]
            asked += ["--slo", load.slo, "--seed", f"{seed}"]
            with server.learning() as factors, tempfile.TemporaryDirectory() as folder:
                saved = Path(folder) / "run.json"
                tidegate("bench", "serve", "--url", url, *asked, "--save", saved)
                (found,) = json.loads(saved.read_text())["runs"]
            result = Result.of(found["attainments"][0]["attainment"], found)
            yield Case(setting._replace(rates=(rate,)), asked, device, factors, result)


def simulated(case: Case, truth: str, host: tuple[Any, ...]) -> tuple[Result, Result]:
    """With the device as the server has measured it at its start, and as fast as it was meanwhile."""
    division = ["--prefill-share", case.setting.share] if case.setting.share else []
    flags = [*case.load, *case.device, "--mode", case.setting.mode, "--max-num-batched-tokens", case.setting.tokens]
    flags += [*division, "--truth", truth, *host]
    learned = ["--factors", ",".join(f"{kind}={factor:.4g}" for kind, factor in case.factors.items())]
    return simulation(flags), simulation([*flags, *learned])


def simulation(flags: list[Any]) -> Result:
    (found,) = json.loads(tidegate("simulate", *flags, "--json"))["results"]
    return Result.of(found["outcome"]["attainment"], found["outcome"])


def row(name: str, results: tuple[Result, ...], factors: dict[str, float]) -> str:
    cells = [
        " / ".join(f"{value * unit:.3g}" for value in values) for *values, unit in zip(*results, UNITS, strict=True)
    ]
    learned = ", ".join(f"{kind} {factor:.2f}" for kind, factor in factors.items())
    return f"| {name} | " + " | ".join(cells) + f" | {learned} |"


def report(cases: list[Case], truth: str, host: tuple[Any, ...]) -> None:
    print(f"| case | {' | '.join(COLUMNS)} | factors |")
    print("|---|" + "---|" * (len(COLUMNS) + 1), flush=True)
    every: list[tuple[Result, ...]] = []
    points: dict[str, list[list[tuple[float, float]]]] = defaultdict(lambda: [[], [], []])
    for case in cases:
        (rate,) = case.setting.rates
        results = (case.found, *simulated(case, truth, host))
        print(row(f"{case.setting}, {rate:g}/s", results, case.factors), flush=True)
        every.append(results)
        for of_one, result in zip(points[str(case.setting)], results, strict=True):
            of_one.append((rate, result.attainment))
    print("\n| setting | goodput, requests/s | simulated | as fast as meanwhile |\n|---|---|---|---|")
    for setting, of_each in points.items():
        print(f"| {setting} | " + " | ".join(f"{goodput(of_one):.2f}" for of_one in of_each) + " |")
    for column, name in enumerate(COLUMNS):
        offs = [
            statistics.median(abs(results[which][column] / results[0][column] - 1.0) for results in every)
            for which in (1, 2)
        ]
        print(f"{name.partition(',')[0]}: in the median off by {offs[0]:.1%}, {offs[1]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=list(SETTINGS))
    parser.add_argument("--truth", help="the latency model that the server measured; with it, all is simulated")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", metavar="FILE", type=Path, help="write what is measured; needs no --truth")
    what.add_argument("--measured", metavar="FILE", type=Path, help="simulate what --measure has written")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.truth and not arguments.measure:
        parser.error("give --truth, or --measure to simulate elsewhere")
    load = LOADS[arguments.device]
    if arguments.measured:
        cases = msgspec.json.decode(arguments.measured.read_bytes(), type=list[Case])
    else:
        cases = []
        for case in measure(arguments.url, load, SETTINGS[arguments.device], arguments.seed):
            cases.append(case)
            if arguments.measure:
                arguments.measure.write_bytes(msgspec.json.encode(cases))
    if arguments.truth:
        report(cases, arguments.truth, load.host)


if __name__ == "__main__":
    main()
