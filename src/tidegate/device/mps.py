"""Sharing a GPU between processes by MPS (NVIDIA's multi-process service): the control daemon's life, and what a
process must have in its environment to be a client with a share.

A client's share is fixed when it starts (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``: how many SMs its kernels may use, not
which). Without a daemon at its pipe directory a process has the GPU directly; so the owner of the memory, which is no
client, keeps its context whatever happens to the service.

Source: NVIDIA, Multi-Process Service, release r580.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError

COMMAND = "nvidia-cuda-mps-control"
DEFAULT_PIPES = "/tmp/nvidia-mps"  # where the driver looks if the environment names no other directory
LEAST_PERCENT, MOST_PERCENT = 20, 90  # of a lane that is kept to a part: kernels in clusters fail on few SMs
QUANTUM_PERCENT = 5  # another percentage is another process: smaller steps are not worth one
ANSWER_SECONDS = 5.0  # for the daemon to answer a command, or to be there once it was started
QUIT_SECONDS = 2  # that clients are given to end when the daemon is told to quit


def percent_of(share: float) -> int:
    """The percentage that a lane's share of the device is given as."""
    return max(LEAST_PERCENT, min(round(share * 100 / QUANTUM_PERCENT) * QUANTUM_PERCENT, MOST_PERCENT))


def pipes_in_use() -> Path:
    """Where CUDA programs with this process's environment look for a daemon."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPES)


def why_not(command: str = COMMAND) -> str | None:
    """Why lanes can't share a GPU by MPS here, for people; None where nothing speaks against it. To be asked before
    this process uses the GPU: a daemon that it finds would make it a client."""
    if shutil.which(command) is None:
        return f"{command} is not installed: it comes with the driver's utilities"
    pipes = pipes_in_use()
    if _answers(command, pipes):
        return (
            f"an MPS daemon that is not Tidegate's already runs (pipe directory {pipes}), and clients of two daemons "
            f"take turns on a GPU: end it (echo quit | CUDA_MPS_PIPE_DIRECTORY={pipes} {command}) or choose another "
            f"--sharing"
        )
    return None


class MpsDaemon:
    """A control daemon of our own for one GPU, with directories of its own. The directory is the same at every start,
    so that a daemon left over by an engine that was killed is found and ended."""

    def __init__(self, gpu: str, home: Path | None = None, command: str = COMMAND) -> None:
        """``gpu``: its UUID, as CUDA_VISIBLE_DEVICES takes it. Raises ConfigError where another engine has it."""
        self._gpu, self._command = gpu, command
        self._home = home or Path(tempfile.gettempdir()) / f"tidegate-mps-{os.getuid()}-{gpu[-12:]}"
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._home.stat().st_uid != os.getuid():
            raise ConfigError(f"{self._home} belongs to another user: remove it")
        self._pipes, self._logs = self._home / "pipes", self._home / "logs"
        self._lock = (self._home / "lock").open("w")  # held for as long as this process lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                "another Tidegate shares this GPU by MPS already: end it, or choose another --sharing"
            ) from None

    def start(self) -> None:
        """A fresh daemon; one that is there already, ours or left over, is ended with all its clients. Raises
        ConfigError where it does not come up."""
        self._end()
        for directory in (self._pipes, self._logs):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
        said_file = self._logs / "start.log"  # a pipe would stay open for as long as the daemon lives
        try:
            with said_file.open("w") as out:
                started = subprocess.run(
                    [self._command, "-d"],
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=ANSWER_SECONDS,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{self._command} could not be started: {error}") from error
        end = now_s() + ANSWER_SECONDS
        while started.returncode == 0 and now_s() < end:
            if _answers(self._command, self._pipes):
                return
            time.sleep(0.02)
        said = _last_line(said_file) or _last_line(self._logs / "control.log") or "it said nothing"
        raise ConfigError(f"{self._command} did not start ({said}): choose another --sharing")

    @property
    def alive(self) -> bool:
        return self._pid() is not None

    def watch(self) -> int | None:
        """A file descriptor that becomes readable when the daemon dies, to be closed by the caller; None where it is
        dead already."""
        pid = self._pid()
        if pid is None:
            return None
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return None

    def client_environment(self, percent: int, low_priority: bool = False) -> dict[str, str]:
        """Makes a process that starts with it a client that may use so much of the GPU. ``low_priority``: kernels of
        other clients are started first."""
        return self._environment() | {
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
            "CUDA_MPS_CLIENT_PRIORITY": "1" if low_priority else "0",
        }

    def close(self) -> None:
        """Ends the daemon, its servers and clients; the directories stay, for whoever reads the logs."""
        self._end()
        self._lock.close()

    def _environment(self) -> dict[str, str]:
        """``CUDA_VISIBLE_DEVICES`` is the same for all: a client's is read as a choice among the server's."""
        named = {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipes), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
        return {**os.environ, **named, "CUDA_VISIBLE_DEVICES": self._gpu}

    def _end(self) -> None:
        pid = self._pid()
        servers = _said(self._command, self._pipes, "get_server_list") if pid is not None else None
        if pid is not None:
            _said(self._command, self._pipes, f"quit -t {QUIT_SECONDS}")
            _end_process(pid)
        self._end_servers([int(word) for word in (servers or "").split() if word.isdigit()])

    def _end_servers(self, known: list[int]) -> None:
        """Servers outlive a daemon that was killed; our own are those whose environment names our pipes."""
        ours = f"CUDA_MPS_PIPE_DIRECTORY={self._pipes}".encode()
        for process in Path("/proc").iterdir():
            try:
                name = (process / "comm").read_text() if process.name.isdigit() else ""
                if name.startswith("nvidia-cuda-mps") and ours in (process / "environ").read_bytes().split(b"\0"):
                    known.append(int(process.name))
            except OSError:
                continue  # it has ended, or is somebody else's
        for pid in set(known):
            _end_process(pid)

    def _pid(self) -> int | None:
        """Of the daemon in our directory, None where there is none."""
        try:
            pid = int((self._pipes / f"{COMMAND}.pid").read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (OSError, ValueError, IndexError):
            return None
        return None if state in "ZX" else pid


def _answers(command: str, pipes: Path) -> bool:
    said = _said(command, pipes, "get_default_active_thread_percentage")
    return said is not None and said[:1].isdigit()


def _said(command: str, pipes: Path, order: str) -> str | None:
    """What the daemon at ``pipes`` answers to an order; None where there is none, or it does not answer."""
    if not (pipes / "control").exists():
        return None
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    try:
        done = subprocess.run(
            [command], input=f"{order}\n".encode(), env=environment, capture_output=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _last_line(file: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return file.read_text(errors="replace").strip().splitlines()[-1]
    return ""


def _end_process(pid: int) -> None:
    """Waits a moment for a process that is no child of ours, then kills it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([descriptor], [], [], QUIT_SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
            select.select([descriptor], [], [], QUIT_SECONDS)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(descriptor)
