"""Reading the JSON body of a request."""

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from tidegate.server.errors import ApiError, bad_request


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as an object. Raises ApiError: 415 wrong content type, 413 too large, 400 not a JSON object."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"The body must be JSON, but its type is {media_type or 'not given'}: "
            "send the header Content-Type: application/json.",
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise bad_request("The connection was closed before the whole body came.") from None
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(content, dict):
        raise bad_request('The body must be a JSON object, like {"model": ...}.', code="invalid_json")
    return content


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {max_bytes} bytes: send a shorter prompt, or fewer prompts in one request.",
        code="body_too_large",
        headers={"Connection": "close"},
    )
