"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidegate.base.errors import EngineDead, Overloaded, RequestError, TidegateError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(TidegateError):
    """An answer other than success. ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """How any failure is told to a client. What we did not foresee is not described: it is in the log."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(str(error))
        case Overloaded():
            seconds = max(1, math.ceil(error.retry_after_s))
            return ApiError(429, str(error), code="overloaded", headers={"Retry-After": str(seconds)})
        case EngineDead():
            return ApiError(500, f"The engine has stopped: {error}", code="engine_dead")
        case HTTPException():
            return _http_error(error)
    return ApiError(500, "Something went wrong in the server; its log says what.", code="internal_error")


def _http_error(error: HTTPException) -> ApiError:
    message = {
        404: "There is nothing at this path. The API is under /v1: for example POST /v1/chat/completions.",
        405: "This path exists, but not with this method; the Allow header names the method to use.",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler for the whole application."""
    answer = as_api_error(error)
    if answer.code == "internal_error":  # answered outside of all middleware, and logged by the HTTP server
        answer.headers["X-Request-Id"] = getattr(request.state, "request_id", "")
    return answer.response()
