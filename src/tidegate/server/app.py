"""The application: all routes over one engine."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from tidegate.base.errors import TidegateError
from tidegate.node.engine import Engine
from tidegate.server.access import Access, RequestId
from tidegate.server.admin import admin_routes
from tidegate.server.chat import chat_routes
from tidegate.server.completions import completion_routes
from tidegate.server.context import Context
from tidegate.server.errors import handle_error
from tidegate.server.settings import ServerSettings
from tidegate.server.status import status_routes
from tidegate.server.tokenizer import Tokenizer
from tidegate.server.tokens import token_routes
from tidegate.server.ui import ui_routes


def create_app(engine: Engine, tokenizer: Tokenizer | None, settings: ServerSettings) -> FastAPI:
    """An ASGI application that serves ``engine``, which must be up, on the loop that the application runs on.

    ``tokenizer`` None: prompts are token ids only, and texts are empty.
    """
    app = FastAPI(title="Tidegate", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    context = Context(engine, tokenizer, settings)
    app.state.engine = engine
    app.state.feed = context.feed
    for routes in (chat_routes, completion_routes, token_routes, status_routes, admin_routes, ui_routes):
        app.include_router(routes(context))
    for kind in (TidegateError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_middleware(Access, settings=settings)
    app.add_middleware(RequestId)
    return app
