"""Lanes whose batches take as long as a latency model says, on a clock of their own: implements ``LaneHost``."""

import os

from tidegate.base.events import BatchDone, BatchEnding, LaneReady
from tidegate.node.lane_host import LaneReading
from tidegate.sim.predicted import PredictedDevice


class PredictedLanes:
    LEAD_SECONDS = 0.001  # between a batch's announcement of its end and the end

    def __init__(self, truth, noise=0.0):
        self.device = PredictedDevice(truth, noise)
        self.now = 0.0
        self.launched = []  # (lane, batch, when)
        self._told = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self, lane):
        self._tell(LaneReady(lane))

    def launch(self, lane, batch):
        self.launched.append((lane, batch, self.now))
        self.device.launch(lane, batch, self.now)
        self._ring()

    def watch(self, register, forget):
        register(self._bell, self._receive)

    def prepare_shares(self, shares):
        pass

    def reading(self, lane, alone):
        return LaneReading()

    def pids(self):
        return {}

    def close(self):
        os.close(self._bell)

    def _tell(self, event):
        self._told.append(event)
        self._ring()

    def _receive(self):
        """What has been told, else what happens next."""
        os.eventfd_read(self._bell)
        if not self._told:
            end, warning = self.device.next_end_s(), self.device.next_warning_s(self.LEAD_SECONDS)
            self.now = max(self.now, min(end, warning))
            if warning < end:
                self._told.append(BatchEnding(*self.device.warn(self.now, self.LEAD_SECONDS)))
            else:
                self._told.append(BatchDone(*self.device.end(self.now)))
        events, self._told = self._told, []
        if self.device.next_end_s() < float("inf"):
            self._ring()
        return events

    def _ring(self):
        os.eventfd_write(self._bell, 1)
