"""The live page: GET /ui, its files under /ui/, and GET /ui/events, which feeds it."""

from contextlib import aclosing
from importlib import resources

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from tidegate import __version__
from tidegate.server.context import Context
from tidegate.server.feed import Feed
from tidegate.server.live import RATE_S, WINDOW_S
from tidegate.server.respond import STREAM_HEADERS, while_connected

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class About(msgspec.Struct, frozen=True):
    """What does not change while the server runs."""

    version: str
    model: str
    device: str
    sharing: str
    max_model_len: int
    block_size: int
    started_s: int  # since the epoch
    window_s: float
    rate_s: float


class _Stream(Response):
    """Server-sent events: "about" once, then a list of snapshots at a time, and "closing" when the server ends."""

    def __init__(self, about: About, feed: Feed) -> None:
        self.status_code = 200
        self.background = None
        self._about = about
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async def tell(kind: bytes, what: object, more: bool = True) -> None:
            event = b"event: " + kind + b"\ndata: " + msgspec.json.encode(what) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        await tell(b"about", self._about)
        async with aclosing(self._feed.watch()) as readings:
            async for snapshots in readings:
                await tell(b"snapshots", snapshots)
        await tell(b"closing", None, more=False)


def ui_routes(context: Context) -> APIRouter:
    router = APIRouter()
    folder = resources.files("tidegate.server") / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
    info = context.engine.info
    about = About(
        version=__version__,
        model=context.settings.model_names[0],
        device=info.device,
        sharing=info.sharing,
        max_model_len=info.max_model_len,
        block_size=info.pool.block_size,
        started_s=context.created,
        window_s=WINDOW_S,
        rate_s=RATE_S,
    )

    def answer(name: str) -> Response:
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(files[name], media_type=kind, headers=_HEADERS)

    @router.get("/ui")
    async def page() -> Response:
        return answer("ui.html")

    @router.get("/ui/")
    async def page_as_folder() -> Response:
        return RedirectResponse("../ui")

    @router.get("/ui/events")
    async def events() -> Response:
        return _Stream(about, context.feed)

    @router.get("/ui/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return answer(name)

    return router
