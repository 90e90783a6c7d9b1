"""What runs here: GET /v1/models, /health, /version, /metrics"""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tidegate import __version__
from tidegate.base.errors import EngineDead
from tidegate.server.context import Context
from tidegate.server.errors import ApiError
from tidegate.server.metrics import CONTENT_TYPE


def status_routes(context: Context) -> APIRouter:
    router = APIRouter()

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "tidegate",
            "root": context.settings.model_names[0],
            "parent": None,
            "max_model_len": context.engine.info.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card(name) for name in context.settings.model_names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(model_card(context.model_name(name)))

    @router.get("/health")
    async def health() -> Response:
        if not context.engine.alive:
            raise ApiError(503, "The engine has stopped: start the server again.", code="engine_dead")
        return JSONResponse({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await context.engine.stats()
            context.recorder.heed(stats)
        except EngineDead:
            stats = None
        return Response(context.metrics.exposition(stats), media_type=CONTENT_TYPE)

    return router
