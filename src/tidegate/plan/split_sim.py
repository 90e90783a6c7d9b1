"""Prefill and decode on different devices: prompts queue at prefill instances, their KV goes over a link, and decode
instances take it up between two steps.

A prompt goes to the instance with the fewest prompt tokens left, which serves by slack, as an engine does; its first
token comes with its last slice. An instance sends one KV cache after the other. A request waits at a decode instance
until there is room for its prompt and whole answer. KV that waits to be sent takes no room here.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from tidegate.plan.demand import Arrival
from tidegate.plan.engine import HOST, NOISE
from tidegate.policy.order import BySlack
from tidegate.slo.goodput import Latency
from tidegate.slo.latency import Costs, Work


class SplitDesign(NamedTuple):
    """``link_s_per_token``: of a prompt's KV on its way."""

    prefills: int
    prefill: Costs
    decodes: int
    decode: Costs
    kv_tokens: int  # of a decode instance
    max_seqs: int
    full_batch: int  # prompt tokens at most
    slice_s: float  # that a batch of prompts may take
    min_slice: int
    link_s_per_token: float


class _Prompt:
    """``policy.order.Prompt``."""

    __slots__ = ("arrived_s", "deadline_s", "index", "late", "launched", "tokens")
    priority = 0
    begun = False

    def __init__(self, index: int, arrived_s: float, deadline_s: float, tokens: int) -> None:
        self.index, self.arrived_s, self.deadline_s, self.tokens = index, arrived_s, deadline_s, tokens
        self.late = False
        self.launched = 0

    @property
    def remaining(self) -> int:
        return self.tokens - self.launched


class _Prefill:
    """An instance, and ``slo.outlook.Outlook`` of its own queue."""

    def __init__(self, design: SplitDesign) -> None:
        self._design = design
        self._order = BySlack()
        self._dense_s = design.prefill.dense(design.full_batch) / design.full_batch
        self.queue: list[_Prompt] = []
        self.tokens = 0  # left, those of the batch that runs included
        self.running = 0  # tokens of that batch
        self.ended: list[_Prompt] = []  # by that batch
        self.busy = False
        self.link_free_s = 0.0
        self.batch_s = 0.0

    def work_s(self, start: int, tokens: int) -> float:
        return self._dense_s * tokens + self._design.prefill.pair_s * tokens * (start + tokens / 2)

    def after_s(self, work_s: float) -> float:
        return work_s

    def next_batch_s(self, now: float) -> float:
        """Of a batch that is made of the queue now."""
        design, work = self._design, Work()
        self.queue.sort(key=self._order.key)
        for prompt in self._order.arrange(self.queue, now, self):
            most = min(prompt.remaining, design.full_batch - work.new)
            count = design.prefill.most_new(work, prompt.launched, most, design.slice_s)
            if work.new == 0:
                count = max(count, min(most, design.min_slice))
            if count == 0:
                break
            work = work.and_slice(prompt.launched, count)
            prompt.launched += count
            self._order.served(prompt, count)
            if prompt.remaining == 0:
                self.ended.append(prompt)
            if count < most or work.new == design.full_batch:
                break
        self.queue = [prompt for prompt in self.queue if prompt.remaining]
        self.running = work.new
        return design.prefill.seconds(work)


class _Decode:
    def __init__(self, design: SplitDesign) -> None:
        self._design = design
        self.ready: deque[tuple[int, Arrival]] = deque()  # their KV is here or may come
        self.reserved = 0  # tokens of KV, of running and ready ones
        self.step_ends_s: list[float] = []
        self.joined: dict[int, int] = {}  # the number of steps before a request's first one
        self._leaving: list[tuple[int, int]] = []  # after how many steps, with how many tokens of context
        self._rows = self._context = self._held = 0
        self.busy = False

    def next_step_s(self) -> float | None:
        """Takes in who fits and returns how long the next step takes; None if there is nobody."""
        design, step = self._design, len(self.step_ends_s)
        while self._leaving and self._leaving[0][0] <= step:
            _, tokens = heapq.heappop(self._leaving)
            self._rows -= 1
            self._context -= tokens
            self._held -= tokens
            self.reserved -= tokens
        while self.ready and self._rows < design.max_seqs:
            index, asked = self.ready[0]
            whole = asked.prompt_tokens + asked.output_tokens
            if self._rows and self._held + whole > design.kv_tokens:
                break
            self.ready.popleft()
            self.joined[index] = step
            heapq.heappush(self._leaving, (step + asked.output_tokens - 1, whole))
            self._rows += 1
            self._context += asked.prompt_tokens + 1
            self._held += whole
        if not self._rows:
            return None
        seconds = design.decode.seconds(Work(rows=self._rows, context=self._context))
        self._context += self._rows
        return seconds


def simulate_split(design: SplitDesign, ttft_s: float, arrivals: Sequence[Arrival], seed: int) -> list[Latency | None]:
    """What each request experiences. Equal arguments, equal results. Raises ValueError for a link with no bandwidth."""
    return _Split(design, ttft_s, arrivals, seed).run()


class _Split:
    def __init__(self, design: SplitDesign, ttft_s: float, arrivals: Sequence[Arrival], seed: int) -> None:
        if not math.isfinite(design.link_s_per_token):
            raise ValueError("KV can't go over a link with no bandwidth")
        self._design, self._ttft_s, self._arrivals = design, ttft_s, arrivals
        self._rng = random.Random(seed)
        self._prefills = [_Prefill(design) for _ in range(design.prefills)]
        self._decodes = [_Decode(design) for _ in range(design.decodes)]
        self._first_s = [0.0] * len(arrivals)
        self._decoder: list[_Decode | None] = [None] * len(arrivals)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # of equal times the older first
        self._count = 0

    def run(self) -> list[Latency | None]:
        for index, arrival in enumerate(self._arrivals):
            self._at(arrival.at_s, partial(self._arrived, index))
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return [self._latency(index) for index in range(len(self._arrivals))]

    def _at(self, time_s: float, happens: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, happens))

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._rng.gauss(0.0, NOISE))

    def _arrived(self, index: int, now: float) -> None:
        asked = self._arrivals[index]
        instance = min(self._prefills, key=lambda prefill: prefill.tokens)
        instance.queue.append(_Prompt(index, now, now + self._ttft_s, asked.prompt_tokens))
        instance.tokens += asked.prompt_tokens
        if not instance.busy:
            self._start_prefill(instance, now, HOST.launch_s)

    def _start_prefill(self, instance: _Prefill, now: float, launch_s: float) -> None:
        instance.busy = bool(instance.queue)
        if instance.busy:
            self._at(now + launch_s + self._noisy(instance.next_batch_s(now)), partial(self._prefilled, instance))

    def _prefilled(self, instance: _Prefill, now: float) -> None:
        for prompt in instance.ended:
            self._first_s[prompt.index] = now
            asked = self._arrivals[prompt.index]
            if asked.output_tokens > 1:
                decoder = min(self._decodes, key=lambda decode: decode.reserved)
                decoder.reserved += asked.prompt_tokens + asked.output_tokens
                self._decoder[prompt.index] = decoder
                start_s = max(now, instance.link_free_s)
                instance.link_free_s = start_s + asked.prompt_tokens * self._design.link_s_per_token
                self._at(instance.link_free_s, partial(self._transferred, decoder, prompt.index))
        instance.ended.clear()
        instance.tokens -= instance.running
        self._start_prefill(instance, now, 0.0)

    def _transferred(self, instance: _Decode, index: int, now: float) -> None:
        instance.ready.append((index, self._arrivals[index]))
        if not instance.busy:
            self._start_step(instance, now, HOST.launch_s)

    def _start_step(self, instance: _Decode, now: float, launch_s: float) -> None:
        seconds = instance.next_step_s()
        instance.busy = seconds is not None
        if seconds is not None:
            self._at(now + launch_s + self._noisy(seconds), partial(self._stepped, instance))

    def _stepped(self, instance: _Decode, now: float) -> None:
        instance.step_ends_s.append(now)
        self._start_step(instance, now, 0.0)

    def _latency(self, index: int) -> Latency:
        asked, decoder = self._arrivals[index], self._decoder[index]
        times_s = [self._first_s[index]]
        if decoder is not None:
            first = decoder.joined[index]
            times_s += decoder.step_ends_s[first : first + asked.output_tokens - 1]
        return Latency.of(asked.at_s - HOST.deliver_s, times_s)
