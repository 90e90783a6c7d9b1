"""Prefill and decode on different devices: xPyD, each phase with its own degree of tensor parallelism.

The two searches of DistServe (Zhong et al., arXiv 2401.09670, Algorithms 1 and 2), for GPUs that are given rather than
traffic:

    high node-affinity   the network between nodes is as good as enough: each phase is simulated alone, the other one
                         costing nothing; its goodput says how many instances of which degree balance, over all GPUs
    low node-affinity    KV must stay within a node: a unit of prefill and decode instances that fills a node is
                         balanced the same way, and every node gets one

Only then are the best pairs simulated together, with the transfer over the link that lies between them: NVLink within a
node, else the network. Pipeline parallelism is not searched.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tidegate.plan import bounds
from tidegate.plan.demand import Arrival
from tidegate.plan.rate import Length, highest_rate
from tidegate.plan.setting import BLOCK_TOKENS, FULL_BATCH, MAX_SEQS, Setting
from tidegate.plan.split_sim import SplitDesign, simulate_split
from tidegate.slo.goodput import Latency, Metric, Slo
from tidegate.slo.latency import Costs

FREE = Costs((1, 2), (0.0, 0.0), 0.0, 0.0, 0.0)  # of a phase that is left out
LOOSE_S = 1e9
PHASE_REQUESTS = 300  # of a simulation of one phase
PAIRS = 4  # of degrees and counts, that are simulated together


class Phase(NamedTuple):
    """Instances of one phase, on ``tp`` devices each. In requests/s of one: ``goodput`` with nothing else in its way,
    and ``capacity``."""

    tp: int
    goodput: float
    capacity: float


class Split:
    """``Candidate``: x prefill and y decode instances."""

    family = "split"
    runnable = False

    def __init__(self, setting: Setting, prefill: Phase, x: int, decode: Phase, y: int, nodes: int = 1) -> None:
        """``nodes``: of which each gets a unit."""
        self._setting, self._prefill, self._x, self._decode, self._y = setting, prefill, x, decode, y
        self.unit_gpus = x * prefill.tp + y * decode.tp
        self.copies = nodes
        self.instances = x + y
        self.kv_tokens = y * setting.memory(decode.tp).kv_tokens
        self.ceiling = min(x * prefill.goodput, y * decode.goodput)
        self.capacity = min(x * prefill.capacity, y * decode.capacity)

    @property
    def name(self) -> str:
        degrees = (self._prefill.tp, self._decode.tp)
        return f"{self._x}P{self._y}D" + (f" · tp {degrees[0]}/{degrees[1]}" if degrees != (1, 1) else "")

    @property
    def link_s_per_token(self) -> float:
        """Of KV from one instance to another, whose devices send side by side."""
        setting = self._setting
        link = setting.device.link(self.unit_gpus) * min(self._prefill.tp, self._decode.tp)
        num_bytes = setting.model.kv_elements_per_token * setting.device.element_bytes
        return num_bytes / link if link > 0 else float("inf")

    def simulate(self, arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
        design = _design(self._setting, self._prefill.tp, self._x, self._decode.tp, self._y, self.link_s_per_token)
        return simulate_split(design, self._setting.slo.ttft_s, arrivals, seed)

    def commands(self) -> list[str]:
        roles = [("prefill", self._x, self._prefill.tp), ("decode", self._y, self._decode.tp)]
        return [
            self._setting.command(tp, "split", f"--role {role}") + (f"   # × {count}" if count > 1 else "")
            for role, count, tp in roles
        ]


class Disaggregation:
    """The searches, which share the phases' goodputs."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._phases: tuple[list[Phase], list[Phase]] | None = None

    def phases(self) -> tuple[list[Phase], list[Phase]]:
        """Prefill's and decode's, one for each degree that reaches the SLO."""
        if self._phases is None:
            setting = self._setting
            prefills = [prefill_phase(setting, tp) for tp in setting.degrees]
            decodes = [decode_phase(setting, tp) for tp in setting.degrees]
            self._phases = [p for p in prefills if p.goodput > 0], [d for d in decodes if d.goodput > 0]
        return self._phases

    def high_affinity(self) -> list[Split]:
        """Over all GPUs as one."""
        return self._best(self._setting.gpus, 1)

    def low_affinity(self) -> list[Split]:
        """Within each node; nothing that ``high_affinity`` does not find where there is one."""
        setting = self._setting
        nodes = setting.gpus // setting.device.per_node
        return self._best(setting.device.per_node, nodes) if nodes > 1 else []

    def using(self, gpus: int) -> list[Split]:
        """The best on so many GPUs, which leave room for others."""
        return self._best(gpus, 1)[:1]

    def _best(self, gpus: int, nodes: int) -> list[Split]:
        """Balanced pairs, best first. ``min(x · prefill, y · decode)`` is what the phases would do with no transfer."""
        splits = [
            Split(self._setting, prefill, x, decode, y, nodes)
            for prefills, decodes in [self.phases()]
            for prefill in prefills
            for decode in decodes
            for x in range(1, (gpus - decode.tp) // prefill.tp + 1)
            for y in [(gpus - x * prefill.tp) // decode.tp]
        ]
        usable = [split for split in splits if split.link_s_per_token < float("inf")]
        return sorted(usable, key=lambda split: (-split.ceiling, split.unit_gpus))[:PAIRS]


def prefill_phase(setting: Setting, tp: int) -> Phase:
    """Its goodput: requests/s whose first tokens one instance gives in time."""
    guess, capacity = bounds.prefill_only(setting, tp)
    design = _design(setting, tp, 1, tp, 1, 0.0)._replace(decode=FREE)
    slo = Slo(setting.slo.ttft_s, LOOSE_S, Metric.TPOT)
    length = Length(PHASE_REQUESTS, setting.slo.ttft_s)

    def simulate(arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
        first = [arrival._replace(output_tokens=1) for arrival in arrivals]
        return simulate_split(design, slo.ttft_s, first, seed)

    if guess <= 0:
        return Phase(tp, 0.0, capacity)
    return Phase(tp, highest_rate(simulate, setting.demand, slo, guess, length, capacity).rate, capacity)


def decode_phase(setting: Setting, tp: int) -> Phase:
    """Its goodput: requests/s that one instance keeps at the pace of the SLO, if they come with their first token."""
    guess, capacity = bounds.decode_only(setting, tp)
    design = _design(setting, tp, 1, tp, 1, 0.0)._replace(prefill=FREE)
    slo = Slo(LOOSE_S, setting.slo.tpot_s, setting.slo.metric)
    length = Length(PHASE_REQUESTS, setting.settle_s)

    def simulate(arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
        return simulate_split(design, slo.ttft_s, arrivals, seed)

    if guess <= 0:
        return Phase(tp, 0.0, capacity)
    return Phase(tp, highest_rate(simulate, setting.demand, slo, guess, length, capacity).rate, capacity)


def _design(setting: Setting, prefill_tp: int, x: int, decode_tp: int, y: int, link_s_per_token: float) -> SplitDesign:
    return SplitDesign(
        prefills=x,
        prefill=setting.latency(prefill_tp).whole,
        decodes=y,
        decode=setting.latency(decode_tp).whole,
        kv_tokens=setting.memory(decode_tp).kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        max_seqs=MAX_SEQS,
        full_batch=FULL_BATCH,
        slice_s=setting.slice_s(prefill_tp),
        min_slice=128,
        link_s_per_token=link_s_per_token,
    )
