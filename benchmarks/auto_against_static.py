"""How mode auto does beside the best static setting of each load: goodput, how the time was spent, and moves.

    python benchmarks/auto_against_static.py --truth model.json

simulates every static setting and auto, and prints a row for each load and SLO. With the URL of a live server, which
was started with `--mode auto --slo ... --no-enable-prefix-caching` and whose own latency model is the truth, the best
two static settings of each simulation and auto are measured there as well, each at a few rates around the simulated
goodput:

    python benchmarks/auto_against_static.py --truth model.json --url http://127.0.0.1:8000 --seconds 30

Overlap: seconds in which both lanes ran, relative to those in which any did.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tidegate.bench import simulate
from tidegate.bench.plan import find_workload
from tidegate.bench.schedule import Schedule
from tidegate.bench.search import Search
from tidegate.cli import parser
from tidegate.sim.predicted import BESIDE
from tidegate.slo.goodput import GOODPUT_ATTAINMENT, goodput
from tidegate.slo.latency_file import read_latency_model

WHOLE_CHUNK_MS = 1e6  # for slices: so long that a chunk's size alone binds
CUT_OFF = 0.9  # of the best static goodput so far, that a setting must attain to be searched
LEAST_SECONDS = 30.0  # of arrivals, simulated: several times as long as an answer
HOPELESS = 0.2  # of a load's first rate: the same, as long as none has any
LIVE_STEP, LIVE_PRECISION = 1.1, 0.05
BEHIND = 0.97


class Usual(NamedTuple):
    """What an engine is started with, and has where no chunk binds."""

    tokens: int  # of a batch at most
    slice_ms: float


class Limit(NamedTuple):
    """An SLO. ``metric``: what the limit on TPOT is for."""

    ttft_ms: int
    metric: str
    tpot_ms: int

    def __str__(self) -> str:
        return f"TTFT ≤ {self.ttft_ms} ms, {'every gap' if self.metric == 'gap' else 'mean'} ≤ {self.tpot_ms} ms"


class Load(NamedTuple):
    workload: str
    first_rate: float  # tried; requests per second
    limits: tuple[Limit, ...]


class Scale(NamedTuple):
    """Of a device. ``flags``: of one that is simulated with no server to ask."""

    loads: dict[str, Load]
    chunks: tuple[int, ...]
    usual: Usual
    flags: tuple[Any, ...] = ()


MEAN_25, GAP_25, GAP_15, GAP_50 = Limit(500, "tpot", 25), *(Limit(500, "gap", ms) for ms in (25, 15, 50))
CPU_TIGHT, CPU_LOOSE = Limit(1000, "tpot", 40), Limit(2000, "tpot", 100)
SCALES = {
    "gpu": Scale(
        {
            "conv": Load("conv", 20.0, (MEAN_25, GAP_25, GAP_15)),
            "code": Load("code", 14.0, (MEAN_25, GAP_25)),
            "chat": Load("chat", 42.0, (MEAN_25, GAP_25)),
            "long": Load("long", 2.4, (MEAN_25, GAP_50)),
            "shifting": Load("conv@30x20,code@30x14,long@30x2.4,chat@30x42", 16.0, (MEAN_25, GAP_25)),
        },
        chunks=(512, 768, 1024, 1536, 2048, 384, 256, 128),
        usual=Usual(8192, 30.0),
    ),
    "cpu": Scale(
        {
            "chat": Load("chat", 1.5, (CPU_TIGHT, CPU_LOOSE)),
            "shifting": Load("chat@60x1.6,conv@60x0.5", 1.0, (CPU_LOOSE,)),
        },
        chunks=(128, 256, 512, 1024, 2048, 64, 32),
        usual=Usual(2048, 200.0),
        flags=(
            "--max-num-seqs", 64, "--max-model-len", 8192, "--num-gpu-blocks-override", 5825,
            "--max-prefill-tokens", 1 << 20, "--max-slices", 1 << 20,
            "--min-slice-tokens", 32, "--slice-quantum-tokens", 16,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    load: str
    workload: str
    first_rate: float
    limit: Limit

    @property
    def slo(self) -> str:
        return f"ttft={self.limit.ttft_ms}ms,tpot={self.limit.tpot_ms}ms"

    @property
    def period_s(self) -> float:
        """Of a load that shifts; 0 for others."""
        workload = find_workload(self.workload)
        return (workload.period_s or 0.0) if isinstance(workload, Schedule) else 0.0

    def seconds(self, requests: int, rate: float) -> float:
        """Of arrivals: so many requests or more, in whole turns of a load that shifts."""
        least = max(requests / rate, LEAST_SECONDS)
        return math.ceil(least / self.period_s) * self.period_s if self.period_s else least


@dataclass(frozen=True)
class Setting:
    mode: str
    chunk: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        return self.mode + (f" {self.chunk}" if self.chunk else "") + (f" {self.share:.0%}" if self.share else "")

    def limits(self, usual: Usual) -> Usual:
        return Usual(self.chunk, WHOLE_CHUNK_MS) if self.chunk else usual

    def flags(self, usual: Usual) -> list[Any]:
        tokens, slice_ms = self.limits(usual)
        share = ["--prefill-share", self.share] if self.share else []
        return ["--mode", self.mode, "--max-num-batched-tokens", tokens, "--slice-ms", slice_ms, *share]


class Result(NamedTuple):
    """``spent``: shares of the time by what ran (simulated), or of the batches by what the gate chose (live)."""

    setting: Setting
    goodput: float
    overlap: float
    spent: dict[str, float]
    moves: int


def tidegate(*arguments: Any) -> str:
    command = (sys.executable, "-m", "tidegate.cli", *map(str, arguments))
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Simulator:
    """``device``: flags that say what is simulated, besides the latency model."""

    def __init__(
        self, truth: str, requests: int, noise: float, seed: int, chunks: Sequence[int], usual: Usual,
        device: Sequence[Any],
    ) -> None:  # fmt: skip
        self._truth, self._requests, self._chunks, self._usual = truth, requests, chunks, usual
        self._device = ["--truth", truth, "--noise", noise, "--seed", seed, *device]

    def statics(self) -> list[Setting]:
        shares = [division.share for division in read_latency_model(self._truth).divisions]
        chunked = (Setting("chunked", chunk) for chunk in self._chunks)
        return [*chunked, Setting("prefill-first"), *(Setting("semi", share=round(share, 3)) for share in shares)]

    def compare(self, case: Case) -> list[Result]:
        """Auto's, then static ones from the best to the worst of those that were not cut off."""
        statics: list[Result] = []
        best = 0.0
        for setting in self.statics():
            least = CUT_OFF * best or HOPELESS * case.first_rate
            if self._run(case, setting, least).outcome.attainment >= GOODPUT_ATTAINMENT:
                statics.append(self._search(case, setting, best or case.first_rate))
                best = max(best, statics[-1].goodput)
        statics.sort(key=lambda result: result.goodput, reverse=True)
        return [self._search(case, Setting("auto"), best or case.first_rate), *statics]

    def _search(self, case: Case, setting: Setting, start: float) -> Result:
        found = self._run(case, setting, start, "--goodput")
        spent = {what: share for what, share in found.outcome.spent.items() if share >= 0.005}
        return Result(setting, found.goodput or 0.0, spent.get(BESIDE, 0.0), spent, found.outcome.moves)

    def _run(self, case: Case, setting: Setting, rate: float, *more: str) -> simulate.Result:
        load = ["--workload", case.workload, "--rate", rate, "--seconds", case.seconds(self._requests, rate)]
        slo = ["--slo", case.slo, "--slo-metric", case.limit.metric]
        flags = setting.flags(self._usual)
        given = ["simulate", *self._device, *load, *slo, *flags, *more]
        (result,) = simulate.simulated(parser().parse_args([str(argument) for argument in given]))
        return result


class Server:
    """A live one, set by its admin endpoints."""

    def __init__(self, url: str, admin_key: str | None, seconds: float, rates: int) -> None:
        """``rates``: tried for each setting, with so many seconds of arrivals; more until one passed and one failed."""
        self._url, self._seconds, self._rates = url, seconds, rates
        self._headers = {"Content-Type": "application/json"}
        if admin_key:
            self._headers["Authorization"] = f"Bearer {admin_key}"
        stats = self._get("/admin/stats")
        self.usual = Usual(stats["max_num_batched_tokens"], stats["slice_ms"])

    def device(self) -> list[Any]:
        """Flags by which a simulation has the same pool and limits."""
        info = self._get("/admin/info")
        pool, limits = info["pool"], info["limits"]
        return [
            "--num-gpu-blocks-override", pool["num_blocks"], "--block-size", pool["block_size"],
            "--max-num-seqs", pool["max_num_seqs"], "--max-model-len", pool["max_model_len"],
            "--max-prefill-tokens", limits["max_prefill_tokens"], "--min-slice-tokens", limits["min_slice_tokens"],
            "--slice-quantum-tokens", limits["slice_quantum_tokens"],
        ]  # fmt: skip

    def measure(self, case: Case, simulated: Result) -> Result:
        """A short search around the simulated goodput."""
        setting = simulated.setting
        self.set(case, setting)
        start = simulated.goodput or case.first_rate
        search = Search(start, precision=LIVE_PRECISION, lowest=start / 4, highest=start * 4, step=LIVE_STEP)
        points: list[tuple[float, float]] = []
        readings = {}
        while (len(points) < self._rates or not search.bracketed) and (rate := search.next_rate()) is not None:
            before = self._get("/admin/stats")
            attained = self._attained(case, rate)
            readings[rate] = (before, self._get("/admin/stats"))
            points.append((rate, attained))
            print(f"{case.load}, {setting}: {attained:.1%} at {rate:.4g}/s", file=sys.stderr)
            search.learn(rate, attained >= GOODPUT_ATTAINMENT)
        found = goodput(points)
        before, after = readings[min(readings, key=lambda rate: abs(rate - found))]
        busy_s, beside_s = (
            {name: lane[key] - before["lanes"][name][key] for name, lane in after["lanes"].items()}
            for key in ("busy_seconds", "beside_seconds")
        )
        both_s = min(max(beside_s.values()), *busy_s.values()) if len(busy_s) > 1 else 0.0
        chosen = {name: count - before["gate_choices"].get(name, 0) for name, count in after["gate_choices"].items()}
        spent = {name: count / sum(chosen.values()) for name, count in chosen.items() if count}
        any_s = max(sum(busy_s.values()) - both_s, 1e-9)
        return Result(setting, found, both_s / any_s, spent, after["gate_moves"] - before["gate_moves"])

    def set(self, case: Case, setting: Setting) -> None:
        tokens, slice_ms = setting.limits(self.usual)
        limits = {"max_num_batched_tokens": tokens, "slice_ms": slice_ms}
        slo = {"order": "slack", "slo": case.slo, "slo_metric": case.limit.metric}
        self._post("/admin/mode", {"mode": setting.mode})
        self._post("/admin/settings", limits | slo)
        if setting.share is not None:
            self._post("/admin/shares", {"prefill": setting.share})

    def _attained(self, case: Case, rate: float) -> float:
        seconds = max(self._seconds, case.period_s)
        load = ["--workload", case.workload, "--rate", rate, "--seconds", seconds]
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "run.json"
            slo = ["--slo", case.slo, "--slo-metric", case.limit.metric]
            tidegate("bench", "serve", "--url", self._url, *load, *slo, "--save", saved)
            attained: float = json.loads(saved.read_text())["runs"][0]["attainments"][0]["attainment"]
        return attained

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(urllib.request.Request(self._url + path, headers=self._headers)) as answer:
            return json.load(answer)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), self._headers)
        urllib.request.urlopen(request).close()


HEAD = (
    "| load | SLO | auto | best static | ratio | next static | auto's {spent} | overlap: auto / static |"
    " moves |\n|---|---|---|---|---|---|---|---|---|"
)


def row(case: Case, results: list[Result]) -> str:
    auto, *statics = results
    best = statics[0] if statics else Result(Setting("none"), 0.0, 0.0, {}, 0)
    ratio = auto.goodput / best.goodput if best.goodput else math.nan  # no static setting attains it at any rate
    told = f"**{ratio:.2f}**" if ratio < BEHIND else "–" if math.isnan(ratio) else f"{ratio:.2f}"
    after = f"{statics[1].setting}: {statics[1].goodput:.2f}" if len(statics) > 1 else "far behind"
    spent = ", ".join(f"{name} {share:.0%}" for name, share in sorted(auto.spent.items(), key=lambda pair: -pair[1]))
    cells = (
        case.load, case.limit, f"{auto.goodput:.2f}", f"{best.setting}: {best.goodput:.2f}", told,
        after, spent, f"{auto.overlap:.0%} / {best.overlap:.0%}", auto.moves,
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def cases(scale: Scale, names: Iterable[str]) -> Iterator[Case]:
    for name in names:
        load = scale.loads[name]
        for limit in load.limits:
            yield Case(name, load.workload, load.first_rate, limit)


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--truth", required=True, help="a latency model's file")
    own.add_argument("--scale", choices=SCALES, default="gpu", help="of loads, SLOs and chunks (default: gpu)")
    own.add_argument("--loads", help="of the scale's, as conv,code (default: all)")
    own.add_argument("--requests", type=int, default=600, help="of a simulation, in no less than 30 s (default: 600)")
    own.add_argument("--noise", type=float, default=0.03, help="of a batch's time, simulated (default: 0.03)")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--url", help="of a live server, to measure the best settings on")
    own.add_argument("--rates", type=int, default=4, help="that are tried live, for each setting (default: 4)")
    own.add_argument("--admin-key", help="of that server (default: none, from the same machine)")
    own.add_argument("--seconds", type=float, default=30.0, help="of arrivals at each live rate (default: 30)")
    arguments = own.parse_args()
    server = Server(arguments.url, arguments.admin_key, arguments.seconds, arguments.rates) if arguments.url else None
    scale = SCALES[arguments.scale]
    usual, device = (server.usual, server.device()) if server else (scale.usual, scale.flags)
    simulator = Simulator(
        arguments.truth, arguments.requests, arguments.noise, arguments.seed, scale.chunks, usual, device
    )
    print("Simulated:\n\n" + HEAD.format(spent="time"), flush=True)
    simulated = {}
    for case in cases(scale, arguments.loads.split(",") if arguments.loads else scale.loads):
        simulated[case] = simulator.compare(case)
        print(row(case, simulated[case]), flush=True)
    if server is None:
        return
    print("\nMeasured:\n\n" + HEAD.format(spent="batches"), flush=True)
    for case, results in simulated.items():
        try:
            auto, *statics = (server.measure(case, result) for result in results[:3])
        finally:
            server.set(case, results[0].setting)  # as it was
        statics.sort(key=lambda result: result.goodput, reverse=True)
        print(row(case, [auto, *statics]), flush=True)


if __name__ == "__main__":
    main()
