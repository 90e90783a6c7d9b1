"""The server as a process of its own: how it starts and how it ends."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
from conftest import eventually

from tidegate.base.errors import ConfigError
from tidegate.server.run import listen

PROGRAM = """
import asyncio, sys, uvloop
from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine, Script
from tidegate.server.run import listen, serve
from tidegate.server.settings import ServerSettings

step_s, drain_s, die_after = map(float, sys.argv[1:])

async def main():
    engine = FakeEngine(lambda request: Script([7]), step_s=step_s)
    listener = listen("127.0.0.1", 0)
    if die_after:
        asyncio.get_running_loop().call_later(die_after, engine.die)
    ready = lambda: print(listener.getsockname()[1], flush=True)
    app = create_app(engine, None, ServerSettings(model_names=("m",)))
    code = await serve(app, listener=listener, drain_timeout_s=drain_s, on_ready=ready)
    assert not engine.alive
    return code

sys.exit(uvloop.run(main()))
"""


@contextmanager
def server(step_s=0.0, drain_s=30.0, die_after=0.0):
    """A server process and a client of it; its model says one token every ``step_s``."""
    arguments = [sys.executable, "-c", PROGRAM, str(step_s), str(drain_s), str(die_after)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield process, client
        finally:
            process.kill()


def refuses_connections(client):
    try:
        socket.create_connection((client.base_url.host, client.base_url.port)).close()
    except ConnectionRefusedError:
        return True
    return False


def stream(client, tokens):
    return client.stream("POST", "/v1/completions", json={"prompt": [1], "max_tokens": tokens, "stream": True})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_status_zero(number):
    with server() as (process, client):
        assert client.get("/health").status_code == 200
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_a_running_stream_is_finished_and_no_new_connection_taken():
    with server(step_s=0.02) as (process, client), stream(client, 100) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses_connections(client))
        events = [line for line in lines if line]
        assert len(events) == 100  # the 99 other tokens, and [DONE]
        assert events[-1] == "data: [DONE]"
        assert process.wait(20) == 0


def test_what_is_not_finished_in_time_ends_as_aborted():
    with server(step_s=0.02, drain_s=0.3) as (process, client), stream(client, 8000) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        *_, error, done = [line.removeprefix("data: ") for line in lines if line]
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "aborted"
        assert process.wait(20) == 0


def test_a_second_signal_does_not_wait_for_running_requests():
    with server(step_s=0.02, drain_s=1000) as (process, client), stream(client, 8000) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        eventually(lambda: refuses_connections(client))
        process.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0


def test_when_the_engine_dies_requests_are_told_and_the_server_fails():
    with server(step_s=0.02, die_after=1.0) as (process, client), stream(client, 8000) as response:
        *_, error, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "engine_dead"
        assert process.wait(20) == 1


def test_a_port_in_use_is_a_configuration_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.77", "no.such.host.invalid"])
def test_a_host_that_is_not_here_is_a_configuration_error(host):
    with pytest.raises(ConfigError, match=r"can't be listened on"):
        listen(host, 0)
