"""The ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from surestep_common.errors import SurestepError

from .admin import AdminRoutes
from .admission import Admission
from .chat import ChatTemplate
from .config import GatewaySettings
from .context import Gateway
from .errors import on_http_exception, on_surestep_error, on_unexpected_error
from .metrics import Metrics
from .middleware import RequestMiddleware
from .ops import OperatorRoutes
from .pool import SchedulerPool
from .routes import OpenAIRoutes
from .tokenizer import Tokenizer
from .vocabulary import check_vocabulary


def make_gateway(settings: GatewaySettings) -> Gateway:
    """Load the text side of the model. Needs a running event loop. Raises InvalidRequest."""
    tokenizer = Tokenizer.load(settings.model)
    check_vocabulary(settings.model, tokenizer)
    return Gateway(
        settings=settings,
        tokenizer=tokenizer,
        template=ChatTemplate.load(settings.model, settings.chat_template),
        pool=SchedulerPool(settings.scheduler_url),
        metrics=Metrics(settings.model_names()[0]),
        admission=Admission(settings),
    )


def make_app(gateway: Gateway, address: str) -> Starlette:
    """All endpoints. `address` is host:port of this server, as `/status` shows it."""
    return Starlette(
        routes=[
            *OpenAIRoutes(gateway).routes(),
            *OperatorRoutes(gateway, address).routes(),
            *AdminRoutes(gateway).routes(),
        ],
        middleware=[
            Middleware(
                RequestMiddleware,
                max_body_bytes=gateway.settings.max_body_bytes,
                admission=gateway.admission,
                metrics=gateway.metrics,
            )
        ],
        exception_handlers={
            SurestepError: on_surestep_error,
            HTTPException: on_http_exception,
            Exception: on_unexpected_error,
        },
    )
