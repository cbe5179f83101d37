"""gRPC plumbing shared by all services: channel options, errors as statuses, health, reflection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from abc import abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from . import access, addresses, tls
from .access import BearerChannel
from .errors import (
    INTERNAL_MESSAGE,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    QueueFull,
    RequestTooLarge,
    SurestepError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    kind_of,
    kind_of_code,
)

logger = logging.getLogger(__name__)

LIVE = "live"  # health of this name says that a server answers, whether or not it serves
MAX_MESSAGE_BYTES = 64 << 20  # a 1M-token prompt as varints is about 4 MiB

# keepalive_timeout alone is not the wait for a ping's answer: since gRPC 1.60 or so that is
# http2.ping_timeout_ms, 60 s by default. Both are set, or a stopped peer is noticed after a minute.
_KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.server_handshake_timeout_ms", 5_000),  # 120 s by default, for a peer that says nothing
    ("grpc.max_allowed_incoming_connections", 4_096),
    # By default a connection holds 4 MiB, and a window that grows, whether or not it is heard.
    ("grpc.experimental.tcp_max_read_chunk_size", 256 << 10),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
)
CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # 30 s by default, in which a peer that came back under another address is not found.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.enable_retries", 0),  # a retried call would be a second request or a second epoch
)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ERROR_KEY = "surestep-error"  # on every status that a handler chose; gRPC's own have none
_PARAM_KEY = "surestep-param"
_RETRY_AFTER_KEY = "retry-after"
_NUM_DELIVERED_KEY = "surestep-num-delivered"

_LOST_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


def connect(address: str) -> grpc.aio.Channel:
    """Open a channel to `host:port`. The channel belongs to the running event loop."""
    channel, metadata = _channel(address), access.credentials()
    return BearerChannel(channel, metadata) if metadata else channel


def _channel(address: str) -> grpc.aio.Channel:
    files = tls.current.get()
    if files is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *files.channel_options())
    return grpc.aio.secure_channel(address, files.channel_credentials(), options=options)


class Server:
    """A gRPC server with health, reflection and error mapping on every service.

    Health of each service (and of "" as a whole) starts as NOT_SERVING; `set_serving` flips it.
    That of LIVE is SERVING from start to stop. Calls need the secret of this process, if it has
    one, or one of the `guests` of `access.Gate`, or go to one of its `public` methods. Others are
    refused before their message is received; health checks without the secret are few at a time.
    """

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        guests: Mapping[str, Sequence[str]] | None = None,
        *,
        public: Collection[str] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_streams: int = 128,
    ) -> None:
        """`max_message_bytes` of what is received; larger messages are refused unread.

        `max_streams` of one connection, those included that were reset and are not gone yet. gRPC
        refuses others by itself, so that a flood of resets costs no time of the event loop.
        """
        _GRPC_LOGGER.addFilter(_is_a_fault)
        gate = access.Gate(guests or {}, public)
        interceptors = [_ErrorInterceptor(), _AccessInterceptor(gate)]
        bounds = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", max_streams),
        )
        self.grpc = grpc.aio.server(interceptors=interceptors, options=(*SERVER_OPTIONS, *bounds))
        self._names = ("", *(service.full_name for service in services))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if (alive := access.alive_method()) is not None:
            _, service, method = alive.split("/")
            self.grpc.add_registered_method_handlers(service, {method: _ALIVE})  # type: ignore[attr-defined]  # stubs
        reflection.enable_server_reflection(
            (
                *self._names[1:],
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            self.grpc,
        )

    async def start(self, address: str) -> int:
        """Bind and start. Returns the bound port. Raises Unavailable when the address is taken."""
        try:
            port = self._add_port(address)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}: {error}") from error
        access.warn_if_exposed(address)
        await self.grpc.start()
        await self.set_serving(False)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        return port

    def _add_port(self, address: str) -> int:
        files, path = tls.current.get(), addresses.socket_path(address)
        with addresses.binding(path) if path is not None else contextlib.nullcontext():
            if files is None:
                return self.grpc.add_insecure_port(address)
            return self.grpc.add_secure_port(address, files.server_credentials())

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service."""
        status = health_pb2.HealthCheckResponse.SERVING
        if not serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let open calls finish for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await asyncio.shield(self.grpc.stop(grace_s))  # cancelled, no later stop would work


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Client side: turn gRPC failures inside the block into SurestepErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error: grpc.aio.AioRpcError | grpc.RpcError) -> SurestepError:
    """Return the SurestepError that a failed call stands for, with or without an event loop."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)  # as all that come from a call
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # stubs
    if _ERROR_KEY not in metadata and error.code() in _LOST_CODES:
        return ConnectionLost(error.details() or error.code().name)
    if _ERROR_KEY not in metadata and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestTooLarge(error.details() or error.code().name)  # gRPC's word for a message
    retry_after = metadata.get(_RETRY_AFTER_KEY)
    param = metadata.get(_PARAM_KEY)
    return kind_of_code(error.code()).error(
        error.details() or error.code().name,
        param=_text(param),
        retry_after=float(retry_after) if retry_after is not None else None,
    )


def tell_num_delivered(context: _Context, count: int) -> None:
    """Server side: say with the status how many chunks of the call went to another stream."""
    context.set_trailing_metadata(((_NUM_DELIVERED_KEY, str(count)),))


def num_delivered(error: grpc.aio.AioRpcError) -> int:
    """Return how many chunks of a failed call went to another stream, before or behind its end."""
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # stubs
    return int(metadata.get(_NUM_DELIVERED_KEY, 0))


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # stubs only
    """Replaces handlers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        return self._instead_of(_UNKNOWN if handler is None else handler, details)

    @abstractmethod
    def _instead_of(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler that serves this call."""


class _Strangers:
    """Health checks of clients that show no secret: few at a time, and each says soon what it asks.

    gRPC bounds a message by the largest of the whole server, so what strangers could have it
    receive is bounded by their number.
    """

    _RECEIVING = 4  # at once
    _WATCHING = 64
    _TIMEOUT_S = 2.0

    def __init__(self) -> None:
        self._receiving = self._open = 0

    def instead_of(self, handler: Any) -> Any:
        """Return a handler whose message is received only when there is room for it."""

        async def serve(requests: AsyncIterator[Any], context: _Context) -> None:
            async with self._place(context):
                request = await self._received(requests, context)
                if handler.unary_unary is not None:  # Check
                    await context.write(await handler.unary_unary(request, context))
                else:  # Watch, which writes by itself
                    await handler.unary_stream(request, context)

        serializers = handler.request_deserializer, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(serve, *serializers)

    @contextlib.asynccontextmanager
    async def _place(self, context: _Context) -> AsyncIterator[None]:
        if self._receiving >= self._RECEIVING or self._open >= self._WATCHING:
            await _abort(context, QueueFull("too many health checks without the gRPC secret"))
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _received(self, requests: AsyncIterator[Any], context: _Context) -> Any:
        self._receiving += 1
        try:
            async with asyncio.timeout(self._TIMEOUT_S):
                return await anext(aiter(requests))
        except (TimeoutError, StopAsyncIteration):
            await _abort(context, DeadlineExceeded("no message came"))
        finally:
            self._receiving -= 1


class _AccessInterceptor(_Interceptor):
    """Refuses calls that the gate does not admit, and lets health checks of strangers wait."""

    def __init__(self, gate: access.Gate) -> None:
        self._gate, self._strangers = gate, _Strangers()

    def _instead_of(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        if not self._gate.admits(details):
            return _REFUSAL
        if self._gate.is_strangers(details):
            return self._strangers.instead_of(handler)
        return handler


async def _refuse(requests: Any, context: _Context) -> None:
    await _abort(context, Unauthenticated("missing or wrong gRPC secret or key"))


async def _say_alive(request: bytes, context: _Context) -> bytes:
    return b""


async def _deny(requests: Any, context: _Context) -> None:
    await _abort(context, Unimplemented("this service has no such method"))


# Of a stream, whatever is called: the message of a unary call is received before its handler runs.
_REFUSAL = grpc.stream_stream_rpc_method_handler(_refuse)
_ALIVE = grpc.unary_unary_rpc_method_handler(_say_alive)
_UNKNOWN = grpc.stream_stream_rpc_method_handler(_deny)


class _ErrorInterceptor(_Interceptor):
    """Turns exceptions of handlers into the status of the error table."""

    def _instead_of(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        for kind in _KINDS:
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                return handler._replace(**{kind: _mapped(behaviour)})
        return handler


def _mapped(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behaviour):

        @functools.wraps(behaviour)
        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            # aclosing: a cancelled call runs the handler's `finally` at once, not at collection.
            async with contextlib.aclosing(behaviour(request, context)) as messages:
                try:
                    async for message in messages:
                        yield message
                except Exception as error:  # noqa: BLE001  # the one place that maps everything
                    await _abort(context, error)

        return stream

    @functools.wraps(behaviour)
    async def unary(request: Any, context: _Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001
            await _abort(context, error)

    return unary


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return code and message of the status that an exception becomes."""
    kind = kind_of(error)
    shown = kind.error is not InternalError or isinstance(error, InternalError)
    return kind.code, str(error) if shown else INTERNAL_MESSAGE


# The call has its status, or its caller has gone and can be told nothing.
_ENDED = grpc.aio.AbortError, grpc.aio.InternalError
_GRPC_LOGGER = logging.getLogger("grpc._cython.cygrpc")


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Keep callers that leave, or reset a stream, out of the log: each would be a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (grpc.aio.InternalError, asyncio.CancelledError))


async def _abort(context: _Context, error: Exception) -> NoReturn:
    if isinstance(error, _ENDED):
        raise error
    kind = kind_of(error)
    if kind.error is InternalError:
        logger.error("unexpected error in a handler", exc_info=error)
    trailing = [*context.trailing_metadata(), (_ERROR_KEY, kind.error.__name__)]
    if isinstance(error, SurestepError):
        if error.param is not None:
            trailing.append((_PARAM_KEY, error.param))
        if error.retry_after is not None:
            trailing.append((_RETRY_AFTER_KEY, f"{error.retry_after:g}"))
    await context.abort(*status_of(error), tuple(trailing))
    raise AssertionError("abort returned")
