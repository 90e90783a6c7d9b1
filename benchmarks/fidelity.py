"""How well `tidegate simulate` predicts a server: each case is measured on a live one, and simulated with its own
latency model, its settings and the same requests.

    tidegate serve --quantization int8 --mode auto --slo ttft=2s,tpot=100ms --no-enable-prefix-caching &
    python benchmarks/fidelity.py cpu --truth ~/.cache/tidegate/latency/*.json

The server is changed from case to case by its admin endpoints. A table, a line a case: measured / simulated.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_SECONDS = 3
LOADS = {  # workload, seconds of arrivals, SLO
    "cpu": ("chat", 60, "ttft=2s,tpot=100ms"),
    "h200": ("conv", 40, "ttft=500ms,tpot=25ms"),
}


@dataclass(frozen=True)
class Case:
    mode: str
    rate: float
    tokens: int  # --max-num-batched-tokens
    share: float | None = None  # of prefill

    def __str__(self) -> str:
        share = f" {self.share:.0%}" if self.share else ""
        return f"{self.mode}{share}, {self.tokens} tokens, {self.rate:g}/s"


CASES = {
    "cpu": [
        Case("prefill-first", 0.5, 2048), Case("prefill-first", 1.0, 2048), Case("chunked", 0.5, 128),
        Case("chunked", 1.0, 128), Case("chunked", 1.0, 512), Case("semi", 0.5, 2048, 0.5),
        Case("semi", 1.0, 2048, 0.5), Case("auto", 0.5, 2048), Case("auto", 1.0, 2048),
    ],
    "h200": [
        Case("prefill-first", 16, 8192), Case("chunked", 16, 512), Case("chunked", 20, 512), Case("chunked", 20, 1024),
        Case("semi", 12, 8192, 0.545), Case("semi", 16, 8192, 0.667), Case("auto", 16, 8192), Case("auto", 22, 8192),
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

    def set(self, case: Case) -> None:
        self.post("/admin/mode", {"mode": case.mode})
        self.post("/admin/settings", {"max_num_batched_tokens": case.tokens})
        if case.share is not None:
            self.post("/admin/shares", {"prefill": case.share})


def tidegate(*arguments: str) -> str:
    return subprocess.run(("tidegate", *arguments), check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=list(CASES))
    parser.add_argument("--truth", required=True, help="the latency model that the server measured")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    server = Server(arguments.url)
    workload, seconds, slo = LOADS[arguments.device]
    info, stats = server.get("/admin/info"), server.get("/admin/stats")
    pool, limits = info["pool"], info["limits"]
    device = [
        "--num-gpu-blocks-override", pool["num_blocks"], "--block-size", pool["block_size"],
        "--max-num-seqs", pool["max_num_seqs"], "--max-model-len", pool["max_model_len"],
        "--slice-ms", stats["slice_ms"], "--max-prefill-tokens", limits["max_prefill_tokens"],
        "--min-slice-tokens", limits["min_slice_tokens"], "--slice-quantum-tokens", limits["slice_quantum_tokens"],
    ]  # fmt: skip
    print("| case | attainment, % | TTFT p50, ms | TTFT p90, ms | TPOT p50, ms | p99 gap, p50, ms |")
    print("|---|---|---|---|---|---|", flush=True)
    off: dict[str, list[float]] = {}
    for case in CASES[arguments.device]:
        load = [
            "--workload", workload, "--seconds", seconds, "--rate", case.rate, "--slo", slo, "--seed", arguments.seed,
        ]  # fmt: skip
        server.set(case)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "run.json"
            tidegate("bench", "serve", "--url", arguments.url, *map(str, load), "--save", str(saved))
            (measured,) = json.loads(saved.read_text())["runs"]
        division = ["--prefill-share", case.share] if case.share else []
        scheduling = ["--mode", case.mode, "--max-num-batched-tokens", case.tokens, *division]
        asked = [*load, *device, *scheduling, "--truth", arguments.truth, "--json"]
        (simulated,) = json.loads(tidegate("simulate", *map(str, asked)))["results"]
        print(row(case, measured, simulated["outcome"], off), flush=True)
    summary = ", ".join(f"{name} {statistics.median(errors):.0%}" for name, errors in off.items())
    print(f"\nIn the median off by: {summary}.")


def row(case: Case, measured: dict[str, Any], simulated: dict[str, Any], off: dict[str, list[float]]) -> str:
    cells = []
    for name, ours, theirs, unit in (
        ("attainment", measured["attainments"][0]["attainment"], simulated["attainment"], 100),
        ("TTFT p50", measured["ttft"]["p50"], simulated["ttft"]["p50"], 1e3),
        ("TTFT p90", measured["ttft"]["p90"], simulated["ttft"]["p90"], 1e3),
        ("TPOT p50", measured["tpot"]["p50"], simulated["tpot"]["p50"], 1e3),
        ("p99 gap p50", measured["gap_p99"]["p50"], simulated["gap_p99"]["p50"], 1e3),
    ):
        cells.append(f"{ours * unit:.3g} / {theirs * unit:.3g}")
        off.setdefault(name, []).append(abs(theirs / ours - 1.0) if ours else 0.0)
    return f"| {case} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
