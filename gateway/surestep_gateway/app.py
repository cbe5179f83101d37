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

from surestep_gateway.apis.embeddings.score_inputs import judging_ids
from surestep_gateway.apis.messages.routes import MessagesRoutes
from surestep_gateway.apis.middleware import RequestMiddleware, RootPath
from surestep_gateway.apis.openai.routes import OpenAIRoutes
from surestep_gateway.apis.operators.admin import AdminRoutes
from surestep_gateway.apis.operators.routes import OperatorRoutes
from surestep_gateway.apis.responses.routes import ResponsesRoutes
from surestep_gateway.apis.responses.running import Running
from surestep_gateway.apis.responses.store import open_store
from surestep_gateway.apis.route import DescribedRoute, Rules
from surestep_gateway.http.admission import Admission
from surestep_gateway.http.answers import Answers
from surestep_gateway.http.bodies import Bodies, BodyLimits
from surestep_gateway.http.browsers import HostCheck, with_cors
from surestep_gateway.http.errors import on_http_exception, on_surestep_error, on_unexpected_error
from surestep_gateway.observability.metrics import GatewayMetrics
from surestep_gateway.request.output_format import with_output_format
from surestep_gateway.schedulers.pool import SchedulerPool
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.embeddings import EmbeddingConfig, HfOverrides, PoolerConfig
from surestep_gateway.text.service import TextService
from surestep_gateway.text.text_processor import TextProcessor
from surestep_gateway.text.vocabulary import check_vocabulary

from .context import Gateway


def make_gateway(settings: GatewaySettings) -> Gateway:
    """Load tokenizer and templates and build a gateway. Raise InvalidRequest.

    Needs a running event loop.
    """
    processor = TextProcessor.load(settings)
    settings = with_output_format(settings, processor)
    processor = replace(processor, settings=settings)
    check_vocabulary(settings.model, processor.tokenizer)
    judging_ids(processor)  # which raises for tokens that are none
    metrics = GatewayMetrics(settings.model_names()[0])
    return Gateway(
        settings=settings,
        embedding=EmbeddingConfig.load(
            settings.model,
            PoolerConfig.model_validate(settings.pooler_config or {}),
            HfOverrides.model_validate(settings.hf_overrides or {}),
        ),
        tokenizer=processor.tokenizer,
        text=TextService(processor, metrics),
        pool=SchedulerPool(settings.scheduler_url),
        metrics=metrics,
        admission=Admission(settings),
        answers=Answers(settings),
        store=open_store(settings),
        running=Running(),
        seeds=_seeds(settings.seed),
        tracer=open_tracer(settings, "surestep-gateway"),
    )


def _seeds(seed: int | None) -> random.Random:
    """Return the generator of seeds: the system's, unless every run shall draw the same ones."""
    return random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311  # no secrets


def make_app(gateway: Gateway, address: str) -> ASGIApp:
    """Build the ASGI application. `address` is host:port of this server, as `/status` shows it."""
    routes = [
        *OpenAIRoutes(gateway).routes(),
        *ResponsesRoutes(gateway).routes(),
        *MessagesRoutes(gateway).routes(),
        *OperatorRoutes(gateway, address).routes(),
        *AdminRoutes(gateway).routes(),
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
                bodies=Bodies(BodyLimits.of(gateway.settings)),
                hosts=HostCheck(gateway.settings),
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
    app = with_cors(app, gateway.settings)  # outside of all, so that errors have headers too
    return RootPath(app, gateway.settings.root_path) if gateway.settings.root_path else app
