"""The HTTP client against a server on loopback that does what servers do, well and badly."""

import asyncio

import pytest
from scripted_server import DONE, EVENT_STREAM, ScriptedServer, chunk, event, whole

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.client import Address, Client
from tidegate.bench.connection import ExchangeFailed
from tidegate.bench.session import first_model


class Collected:
    def __init__(self):
        self.status = 0
        self.body = b""
        self.times = []

    def begin(self, status):
        self.status = status

    def receive(self, data, now):
        self.body += data
        self.times.append(now)


def talk(answer, conversation):
    """Runs ``conversation(client, server)`` against a server that answers with ``answer``."""

    async def main():
        async with ScriptedServer(answer) as server:
            client = Client(server.url, api_key="secret")
            try:
                return await asyncio.wait_for(conversation(client, server), 20)
            finally:
                client.close()

    return asyncio.run(main())


async def post(client):
    collected = Collected()
    await client.post("/v1/completions", b'{"n": 1}', collected)
    return collected


def test_a_request_has_its_path_its_body_and_the_key():
    async def answer(call):
        await call.send(whole(200, b"{}"))

    async def conversation(client, server):
        await post(client)
        (call,) = server.calls
        assert call.path == "/v1/completions"
        assert call.body == {"n": 1}
        assert "Authorization: Bearer secret\r\n" in call.head
        assert f"Host: 127.0.0.1:{server.port}\r\n" in call.head

    talk(answer, conversation)


def test_chunks_are_joined_wherever_packets_end():
    stream = EVENT_STREAM + chunk(event()) + chunk(event(" b")) + b"0\r\n\r\n"

    async def answer(call):
        await call.send(*(stream[i : i + 7] for i in range(0, len(stream), 7)), pause_s=0.001)

    async def conversation(client, server):
        collected = await post(client)
        assert collected.status == 200
        assert collected.body == event() + event(" b")
        assert collected.times == sorted(collected.times)

    talk(answer, conversation)


def test_a_connection_is_used_again_and_as_many_are_open_as_exchanges_go_on():
    async def answer(call):
        await call.stream(event(), DONE, pause_s=0.01)

    async def conversation(client, server):
        await asyncio.gather(*(post(client) for _ in range(3)))
        assert server.connections == 3
        for _ in range(4):
            await post(client)
        assert server.connections == 3

    talk(answer, conversation)


def test_a_kept_connection_that_the_server_closes_when_it_is_used_is_replaced():
    answered = []

    async def answer(call):
        if call.connection in answered:
            call.hang_up()
        else:
            answered.append(call.connection)
            await call.send(whole(200, b"ok"))

    async def conversation(client, server):
        assert (await post(client)).body == b"ok"
        assert (await post(client)).body == b"ok"
        assert server.connections == 2

    talk(answer, conversation)


def test_a_connection_is_not_used_again_after_the_server_said_close():
    async def answer(call):
        await call.send(whole(200, b"ok", b"Connection: close\r\n"))

    async def conversation(client, server):
        await post(client)
        await post(client)
        assert server.connections == 2

    talk(answer, conversation)


@pytest.mark.parametrize("begin", [b"", EVENT_STREAM, EVENT_STREAM + chunk(event())])
def test_an_answer_that_breaks_off_is_a_connection_failure(begin):
    async def answer(call):
        await call.send(begin, pause_s=0.01)
        call.hang_up()

    async def conversation(client, server):
        with pytest.raises(ExchangeFailed) as failure:
            await post(client)
        assert failure.value.kind == "connection"
        assert failure.value.answered == bool(begin)
        assert server.connections == 1

    talk(answer, conversation)


def test_what_is_not_http_is_a_protocol_failure():
    async def answer(call):
        await call.send(b"SSH-2.0-OpenSSH_9.9\r\n")

    async def conversation(client, server):
        with pytest.raises(ExchangeFailed, match=r"not HTTP/1\.1") as failure:
            await post(client)
        assert failure.value.kind == "protocol"

    talk(answer, conversation)


def test_no_server_is_a_connection_failure_that_names_the_port():
    async def main():
        async with ScriptedServer(None) as server:
            port = server.port
        with pytest.raises(ExchangeFailed, match=f"port {port}") as failure:
            await post(Client(f"http://127.0.0.1:{port}"))
        assert failure.value.kind == "connection"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:8000", Address("host", 8000, False, "")),
        ("http://host:8000/v1/", Address("host", 8000, False, "")),
        ("https://host/some/where/v1", Address("host", 443, True, "/some/where")),
        ("http://[::1]:81/", Address("::1", 81, False, "")),
    ],
)
def test_addresses(url, address):
    assert Address.parse(url) == address


def test_the_host_header_has_a_port_that_is_not_the_usual_one():
    assert Address.parse("http://[::1]:81").host_header == "[::1]:81"
    assert Address.parse("https://host").host_header == "host"


@pytest.mark.parametrize("url", ["host:8000", "127.0.0.1", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match="is not an address"):
        Address.parse(url)


def test_the_first_model_of_the_server_is_found():
    async def answer(call):
        assert call.path == "/v1/models"
        await call.send(whole(200, b'{"object": "list", "data": [{"id": "one"}, {"id": "two"}]}'))

    async def conversation(client, server):
        assert await first_model(client) == "one"

    talk(answer, conversation)


@pytest.mark.parametrize(("status", "body"), [(200, b'{"data": []}'), (401, b"no key"), (200, b"<html>")])
def test_a_server_that_names_no_model_is_an_error_that_shows_its_answer(status, body):
    async def answer(call):
        await call.send(whole(status, body))

    async def conversation(client, server):
        with pytest.raises(TidegateError, match=f"status {status}.*{body.decode()[:6]}"):
            await first_model(client)

    talk(answer, conversation)
