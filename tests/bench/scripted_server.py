"""An HTTP server that answers as a test says, byte by byte, on the test's own loop."""

import asyncio
import json

EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text=" a", finish=None, **more):
    """A completion's event, as bytes."""
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


def usage(prompt, completion):
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status, body, headers=b""):
    return b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), headers, body)


class Call:
    """One request that came, and the way to answer it."""

    def __init__(self, head, body, reader, writer, connection):
        self.path = head.split(" ")[1]
        self.head = head
        self.body = body
        self.connection = connection  # the number of the connection that it came on
        self._reader = reader
        self._writer = writer

    async def send(self, *parts, pause_s=0.0):
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def stream(self, *events, pause_s=0.0):
        """A whole stream of events: each in a chunk and a packet of its own."""
        await self.send(EVENT_STREAM, *(chunk(data) for data in events), pause_s=pause_s)
        await self.send(b"0\r\n\r\n")

    @property
    def gone(self):
        """Whether the client has closed the connection."""
        return self._reader.at_eof()

    def hang_up(self):
        self._writer.transport.abort()


class ScriptedServer:
    """Awaits ``answer(call)`` for each request while it is entered; all calls so far are in ``calls``."""

    def __init__(self, answer):
        self.calls = []
        self.connections = 0
        self._answer = answer

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [line for line in head.split("\r\n") if line.startswith("Content-Length:")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                call = Call(head, json.loads(body) if body else None, reader, writer, number)
                self.calls.append(call)
                await self._answer(call)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
