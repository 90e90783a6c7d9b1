import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest


class ServerProcess:
    """``tidegate serve`` as a user starts it, on a free port; stderr is kept in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidegate.cli", "serve", "--port", "0", *arguments], stderr=stderr
            )
        self.url = ""

    def wait_ready(self, seconds: float = 120) -> "ServerProcess":
        for _ in range(int(seconds / 0.1)):
            found = re.search(r"ready in .*: (http://\S+)", self.log.read_text())
            if found:
                self.url = found.group(1)
                return self
            if self.process.poll() is not None:
                break
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The small real model, as ``make serve`` serves it."""
    running = ServerProcess(tmp_path_factory.mktemp("server") / "log", "--max-model-len", "2048").wait_ready()
    yield running
    assert running.stop() == 0
