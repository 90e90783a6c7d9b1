"""Around every request: its id, and who may make it. Plain ASGI, so that a streamed event costs next to nothing."""

import hmac
import ipaddress
import re
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.server.errors import ApiError
from tidegate.server.settings import ServerSettings

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class RequestId:
    """Gives each request an id (the client's X-Request-Id, if it is a plain word) and says it in the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Access:
    """/v1/* needs an API key where any is set. The operator's paths need the admin key; where none is set, they are
    open to this machine: to a peer on the loopback interface that is neither a proxy nor another site's web page. What
    only tells how the server is doing (/health, /metrics, /ui) is open to all."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path: str = scope["path"]
        headers = Headers(scope=scope)
        if path.startswith("/v1/") and self._settings.api_keys and not _has_key(headers, self._settings.api_keys):
            return _unauthorized("API key")
        if path.startswith("/admin/") or path == "/reset_prefix_cache":
            if self._settings.admin_key is not None:
                return None if _has_key(headers, (self._settings.admin_key,)) else _unauthorized("admin key")
            if not _is_local(scope, headers):
                return ApiError(
                    403,
                    "Without an admin key, this path answers only clients on the server's own machine: "
                    "start the server with an admin key to use it from elsewhere.",
                    code="admin_only",
                )
        return None


def _unauthorized(kind: str) -> ApiError:
    return ApiError(
        401,
        f"This needs a valid {kind}: send it as 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _has_key(headers: Headers, keys: tuple[str, ...]) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # All keys are compared, in constant time each, so that the time taken tells nothing about them.
    matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


def _is_local(scope: Scope, headers: Headers) -> bool:
    peer = scope.get("client")
    if peer is None or not _is_loopback(peer[0]) or any(name in headers for name in _FORWARDED):
        return False
    # A web page that the operator visits must not reach this through the browser, not even under a name that its
    # author has pointed at this machine.
    host = headers.get("host", "")
    origin = headers.get("origin")
    name = urlsplit(f"//{host}").hostname or ""
    return (name == "localhost" or _is_address(name)) and (origin is None or urlsplit(origin).netloc == host)


def _is_loopback(address: str) -> bool:
    if not _is_address(address):
        return False
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
