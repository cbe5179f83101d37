"""The ASGI application."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
from surestep_gateway.text.service import TextProcessor
from surestep_gateway.text.tokenizer import check_vocabulary

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
from .context import Gateway, Models
from .http.admission import Admission, Rules, Seats
from .http.bodies import Bodies, BodyLimits
from .http.errors import on_http_exception, on_surestep_error, on_unexpected_error
from .observability.metrics import GatewayMetrics
from .request.output_format import with_output_format
from .schedulers.pool import SchedulerPool
from .settings.config import GatewaySettings
from .text.pool import TextPool
from .text.service import TextService


def make_models(each: Sequence[GatewaySettings]) -> Models:
    """Load tokenizers and templates of all models. Raise InvalidRequest.

    Needs a running event loop.
    """
    processors = [_processor(settings) for settings in each]
    first = processors[0].settings
    metrics = GatewayMetrics([one.settings.model_names[0] for one in processors])
    pool = TextPool(processors, metrics)
    admission = Admission(first, sum(one.settings.max_concurrent_requests for one in processors))
    answers, seeds = Answers(first), _seeds(first.seed)
    tracer = open_tracer(first, "surestep-gateway")
    return Models(
        [
            Gateway(
                settings=processor.settings,
                tokenizer=processor.tokenizer,
                text=TextService(processor, pool),
                pool=_pool(processor.settings),
                requests=metrics.of_model(processor.settings.model_names[0]),
                seats=Seats(processor.settings.max_concurrent_requests),
                metrics=metrics,
                admission=admission,
                answers=answers,
                seeds=seeds,
                tracer=tracer,
                text_pool=pool,
            )
            for processor in processors
        ]
    )


def _pool(settings: GatewaySettings) -> SchedulerPool:
    coming = settings.comes_and_goes
    return SchedulerPool(settings.scheduler_url, settings.model_names[0], comes_and_goes=coming)


def _processor(settings: GatewaySettings) -> TextProcessor:
    """Return a model's text processor, with the settings that its files decide."""
    processor = TextProcessor.load(settings)
    processor = replace(processor, settings=with_output_format(settings, processor))
    check_vocabulary(settings.model, processor.tokenizer)
    judging_ids(processor)  # which raises for tokens that are none
    return processor


def _seeds(seed: int | None) -> random.Random:
    """Return the generator of seeds: the system's, unless every run shall draw the same ones."""
    return random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311  # no secrets


def make_app(models: Models, store: Store, address: str) -> ASGIApp:
    """Build the ASGI application. Raise InvalidRequest for an embedding model of another kind.

    `store` keeps responses; `address` is host:port of this server, as `/status` shows it.
    """
    gateway = models.first
    settings = gateway.settings
    texts, vectors = OpenAIRoutes(models), EmbeddingRoutes(models)
    routes = [
        *texts.routes(),
        *vectors.routes(),
        *InvocationRoutes(models, texts, vectors).routes(),
        *ResponsesRoutes(models, store).routes(),
        *MessagesRoutes(models).routes(),
        *OperatorRoutes(models, address).routes(),
        *AdminRoutes(models).routes(),
        *EngineControlRoutes(models).routes(),
        *WeightRoutes(models).routes(),
        *AdapterRoutes(models).routes(),
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
                gateways=settings.gateways(),
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
