"""For the operator: /admin/* and /reset_prefix_cache. Who may use them is decided in ``access``."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tidegate.base.errors import ConfigError
from tidegate.base.events import Tuned
from tidegate.server.body import read_json
from tidegate.server.context import Context
from tidegate.server.errors import bad_request
from tidegate.server.protocol import ModeRequest, SettingsRequest, SharesRequest, parse
from tidegate.slo.parse import parse_limits


def admin_routes(context: Context) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.get("/admin/stats")
    async def stats() -> Response:
        return _json(await engine.stats())

    @router.get("/admin/info")
    async def info() -> Response:
        """What the engine is: model shape, pool, modes, device."""
        return _json(engine.info)

    @router.post("/admin/shares")
    async def shares(request: Request) -> Response:
        """Divides the compute, as ``{"prefill": 0.6}`` (decode has the rest); answers with the statistics."""
        asked = parse(await read_json(request, context.settings.max_body_bytes), SharesRequest)
        decode = 1 - asked.prefill if asked.decode is None else asked.decode
        if abs(asked.prefill + decode - 1) > 1e-6:
            raise bad_request("'prefill' and 'decode' must together be 1.", "decode")
        return _json(await engine.set_shares({"P": asked.prefill, "D": decode}))

    @router.post("/admin/settings")
    async def settings(request: Request) -> Response:
        """Changes settings while serving, as ``{"max_num_batched_tokens": 512, "slo": "ttft=500ms,tpot=25ms"}``."""
        asked = parse(await read_json(request, context.settings.max_body_bytes), SettingsRequest)
        try:
            limits = parse_limits(asked.slo) if asked.slo else {}
        except ConfigError as error:
            raise bad_request(str(error), "slo") from None
        tuned = Tuned(
            max_num_batched_tokens=asked.max_num_batched_tokens,
            slice_ms=asked.slice_ms,
            order=asked.order,
            gate=asked.gate,
            ttft_s=limits.get("ttft"),
            tpot_s=limits.get("tpot"),
            slo_metric=asked.slo_metric,
        )
        stats = await engine.tune(tuned)
        context.recorder.heed(stats)
        return _json(stats)

    @router.post("/admin/mode")
    async def mode(request: Request) -> Response:
        """Changes the mode, as ``{"mode": "semi"}``; answers once it is in force."""
        asked = parse(await read_json(request, context.settings.max_body_bytes), ModeRequest)
        return _json(await engine.set_mode(asked.mode))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forgets cached prefixes that no request is using."""
        return _json(await engine.reset_prefix_cache())

    return router


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
