"""The ASGI application."""

from __future__ import annotations

import random
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp
from surestep_common.errors import SurestepError
from surestep_common.tracing import open_tracer

from surestep_gateway.apis.requests import RequestMiddleware, RootPath
from surestep_gateway.http.admission import HostCheck, with_cors
from surestep_gateway.http.bodies import Answers
from surestep_gateway.settings.api_settings import HfOverrides, PoolerConfig
from surestep_gateway.text.tokenizer import check_vocabulary

from .apis.embeddings.config import EmbeddingConfig
from .apis.embeddings.routes import EmbeddingRoutes
from .apis.embeddings.score_inputs import judging_ids
from .apis.invocations.routes import InvocationRoutes
from .apis.messages.routes import MessagesRoutes
from .apis.openai.routes import OpenAIRoutes
from .apis.operators.adapters import AdapterRoutes
from .apis.operators.admin import AdminRoutes
from .apis.operators.engine_control import EngineControlRoutes
from .apis.operators.routes import OperatorRoutes
from .apis.operators.weights import WeightRoutes
from .apis.responses.routes import ResponsesRoutes
from .apis.responses.store import Store
from .apis.route import DescribedRoute
from .context import Gateway
from .http.admission import Admission, Rules
from .http.bodies import Bodies, BodyLimits
from .http.errors import on_http_exception, on_surestep_error, on_unexpected_error
from .observability.metrics import GatewayMetrics
from .request.output_format import with_output_format
from .schedulers.pool import SchedulerPool
from .settings.config import GatewaySettings
from .text.service import TextService
from .text.text_processor import TextProcessor


def make_gateway(settings: GatewaySettings) -> Gateway:
    """Load tokenizer and templates and build a gateway. Raise InvalidRequest.

    Needs a running event loop.
    """
    processor = TextProcessor.load(settings)
    settings = with_output_format(settings, processor)
    processor = replace(processor, settings=settings)
    check_vocabulary(settings.model, processor.tokenizer)
    judging_ids(processor)  # which raises for tokens that are none
    metrics = GatewayMetrics(settings.model_names[0])
    return Gateway(
        settings=settings,
        tokenizer=processor.tokenizer,
        text=TextService(processor, metrics),
        pool=SchedulerPool(settings.scheduler_url),
        metrics=metrics,
        admission=Admission(settings),
        answers=Answers(settings),
        seeds=_seeds(settings.seed),
        tracer=open_tracer(settings, "surestep-gateway"),
    )


def _seeds(seed: int | None) -> random.Random:
    """Return the generator of seeds: the system's, unless every run shall draw the same ones."""
    return random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311  # no secrets


def make_app(gateway: Gateway, store: Store, address: str) -> ASGIApp:
    """Build the ASGI application. Raise InvalidRequest for an embedding model of another kind.

    `store` keeps responses; `address` is host:port of this server, as `/status` shows it.
    """
    settings = gateway.settings
    config = EmbeddingConfig.load(
        settings.model,
        PoolerConfig.model_validate(settings.pooler_config or {}),
        HfOverrides.model_validate(settings.hf_overrides or {}),
    )
    texts, vectors = OpenAIRoutes(gateway), EmbeddingRoutes(gateway, config)
    routes = [
        *texts.routes(),
        *vectors.routes(),
        *InvocationRoutes(gateway, texts, vectors).routes(),
        *ResponsesRoutes(gateway, store).routes(),
        *MessagesRoutes(gateway).routes(),
        *OperatorRoutes(gateway, address).routes(),
        *AdminRoutes(gateway).routes(),
        *EngineControlRoutes(gateway).routes(),
        *WeightRoutes(gateway).routes(),
        *AdapterRoutes(gateway).routes(),
    ]
    for route in routes:
        if isinstance(route, DescribedRoute) and route.rule.counted:
            gateway.metrics.answers.expect(route.path, streams=route.description.streams)
    app: ASGIApp = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                RequestMiddleware,
                rules=Rules(routes),
                bodies=Bodies(BodyLimits.of(settings)),
                hosts=HostCheck(settings),
                admission=gateway.admission,
                metrics=gateway.metrics,
                tracer=gateway.tracer,
            )
        ],
        exception_handlers={
            SurestepError: on_surestep_error,
            HTTPException: on_http_exception,
            Exception: on_unexpected_error,
        },
    )
    app = with_cors(app, settings)  # outside of all, so that errors have headers too
    return RootPath(app, settings.root_path) if settings.root_path else app
