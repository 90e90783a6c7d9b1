"""A lane uses fewer threads while others take its cores, and all of them again soon after."""

from tidegate.device.crowding import LONGEST_PAUSE_SECONDS, Crowding, waited_seconds

STEP_SECONDS = 0.025


class Machine:
    """Runs batches of a lane with ``cores``, some of which others use; threads beyond the rest wait half the time."""

    def __init__(self, cores: int) -> None:
        self.cores, self.busy, self.now, self.waited = cores, 0, 100.0, 0.0
        self.crowding = Crowding(lambda: self.waited)

    def run(self, seconds: float) -> list[int]:
        """The number of threads of each batch."""
        used = []
        for _ in range(round(seconds / STEP_SECONDS)):
            threads = self.crowding.threads(self.cores)
            self.waited += 0.5 * STEP_SECONDS * max(0, threads - (self.cores - self.busy))
            self.now += STEP_SECONDS
            self.crowding.ran(self.cores, STEP_SECONDS, self.now)
            used.append(threads)
        return used


def test_alone_it_uses_all_cores() -> None:
    assert set(Machine(4).run(10)) == {4}


def test_beside_busy_processes_it_leaves_them_their_cores_and_rarely_tries_again() -> None:
    machine = Machine(4)
    machine.busy = 2
    used = machine.run(60)
    assert used[:4] == [4, 3, 2, 2]
    assert used.count(2) > 0.95 * len(used) and min(used) == 2


def test_it_keeps_one_thread_however_crowded() -> None:
    machine = Machine(2)
    machine.busy = 2
    assert min(machine.run(20)) == 1


def test_when_the_others_have_gone_it_has_all_cores_within_seconds_and_keeps_them() -> None:
    machine = Machine(4)
    machine.busy = 3
    machine.run(30)
    machine.busy = 0
    machine.run(4 * LONGEST_PAUSE_SECONDS)
    assert set(machine.run(10)) == {4}


def test_short_batches_are_judged_together() -> None:
    waited = 0.0
    crowding = Crowding(lambda: waited)
    for i in range(100):
        waited += 0.0005
        crowding.ran(2, 0.001, 10.0 + 0.001 * i)
    assert crowding.threads(2) == 1


def test_the_kernels_account_is_in_seconds() -> None:
    before = waited_seconds()
    assert 0.0 <= before <= waited_seconds() < 1e6
