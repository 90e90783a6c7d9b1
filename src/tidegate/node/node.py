"""The node's loop: waits for the server and the lanes, feeds the core, carries its actions out."""

import logging
import selectors
from collections.abc import Callable, Sequence
from typing import Protocol

from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError
from tidegate.base.events import (
    Aborted,
    Action,
    Arrived,
    CacheReset,
    Emit,
    Event,
    LaneGone,
    LaneLost,
    LaneReady,
    Launch,
    ModeSet,
    Resize,
    SharesSet,
    Wake,
)
from tidegate.base.stats import Stats
from tidegate.core.config import check_shares
from tidegate.core.core import Core
from tidegate.node import wire
from tidegate.node.lane_host import LaneHost
from tidegate.node.lane_watch import LaneWatch
from tidegate.policy.modes import MODES

log = logging.getLogger("tidegate.node")


class OnEvent(Protocol):
    def __call__(self, event: Event, now: float) -> list[Action]: ...


class Node:
    def __init__(self, core: Core, on_event: OnEvent, lanes: LaneHost, server: wire.Channel) -> None:
        self._core = core
        self._on_event = on_event  # the core's, or a recorder's
        self._lanes = lanes
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._watch = LaneWatch()
        self._mode_asked: list[wire.Ask] = []  # answered once their mode is in force
        self._running = True

    def run(self, ready: Callable[[], wire.EngineInfo], earlier: Sequence[Event] = ()) -> None:
        """Serves until told to shut down or until the server is gone. Tells the server ``ready()`` once all lanes of
        the mode are up; raises ConfigError if they can't be brought up. ``earlier``: what lanes have told before."""
        self._selector.register(self._server, selectors.EVENT_READ, self._from_server)
        self._lanes.watch(
            lambda fd, receive: void(self._selector.register(fd, selectors.EVENT_READ, receive)),
            lambda fd: void(self._selector.unregister(fd)),
        )
        for event in earlier:
            self._handle(event)
        told = self._tell(ready)
        while self._running:
            for key, mask in self._selector.select():
                if mask & selectors.EVENT_WRITE:
                    self._server.flush()
                if mask & selectors.EVENT_READ:
                    for event in key.data():
                        self._handle(event)
            told = told or self._tell(ready)
            self._watch_server_writes()

    def _tell(self, ready: Callable[[], wire.EngineInfo]) -> bool:
        """Whether the lanes of the mode are up, and the server knows it now."""
        up = all(self._core.lanes[spec.name].alive for spec in self._core.mode.lanes)
        if up:
            self._server.send(wire.Ready(ready()))
        return up

    def _handle(self, event: Event) -> None:
        for action in self._on_event(event, now_s()):
            match action:
                case Launch(lane, batch):
                    self._lanes.launch(lane, batch)
                case Emit(outputs):
                    self._server.send(wire.Outputs(outputs))
                case Resize(shares) if len(self._core.mode.lanes) > 1:
                    self._lanes.prepare_shares(shares)
                case Wake(lane):
                    self._lanes.start(lane)
        if isinstance(event, LaneLost):
            self._restart(event)
        elif isinstance(event, LaneGone):
            said = event.reason if event.config else f"lane {event.lane} could not be kept running: {event.reason}"
            self._server.send(wire.Fatal(said, config=event.config))
            self._running = False
        elif isinstance(event, LaneReady):
            log.info("lane %s is up", event.lane)
        if self._mode_asked:
            self._answer_modes()

    def _restart(self, event: LaneLost) -> None:
        log.error("lane %s was lost: %s", event.lane, event.reason)
        if self._watch.may_restart(event.lane, now_s()):
            self._lanes.start(event.lane)
            return
        self._handle(LaneGone(event.lane, event.reason))

    def _from_server(self) -> list[Event]:
        messages, closed = self._server.receive()
        events: list[Event] = []
        for message in messages:
            match message:
                case wire.Submit(request):
                    events.append(Arrived(request))
                case wire.Abort(request_id):
                    events.append(Aborted(request_id))
                case wire.Ask():
                    self._ask(message)
                case wire.Shutdown():
                    self._running = False
        if closed:
            self._running = False
        return events

    def _ask(self, ask: wire.Ask) -> None:
        try:
            if ask.mode is not None:
                if ask.mode not in MODES:
                    raise ConfigError(f"unknown mode {ask.mode!r}; choose one of {', '.join(MODES)}")
                self._handle(ModeSet(ask.mode))
                self._mode_asked.append(ask)
                self._answer_modes()
                return
            if ask.shares is not None:
                check_shares(ask.shares)
                self._handle(SharesSet(ask.shares))
            if ask.tuned is not None:
                self._handle(ask.tuned)
            if ask.reset_prefix_cache:
                self._handle(CacheReset())
        except ConfigError as error:
            self._server.send(wire.Reply(ask.seq, self._stats(), str(error)))
            return
        self._server.send(wire.Reply(ask.seq, self._stats()))

    def _stats(self) -> Stats:
        """The core's, and what only lanes know."""
        stats = self._core.stats()
        alone = len(self._core.mode.lanes) == 1
        for name, lane in stats.lanes.items():
            reading = self._lanes.reading(name, alone)
            lane.sms, lane.extra_memory_bytes = reading.sms, reading.extra_memory_bytes
            lane.hybrid_attention = dict(reading.hybrid_attention)
        return stats

    def _answer_modes(self) -> None:
        waiting = []
        for ask in self._mode_asked:
            if self._core.mode.name == ask.mode:
                self._server.send(wire.Reply(ask.seq, self._stats()))
            elif ask is not self._mode_asked[-1]:
                self._server.send(wire.Reply(ask.seq, self._stats(), "another change of mode came in between"))
            else:
                waiting.append(ask)
        self._mode_asked = waiting

    def _watch_server_writes(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._server.wants_write else 0)
        if self._running and self._selector.get_key(self._server).events != events:
            self._selector.modify(self._server, events, self._from_server)


def void(_: object) -> None:
    """For callbacks whose result nobody reads."""
