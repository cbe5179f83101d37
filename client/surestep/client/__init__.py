"""Clients of the Scheduler service: token ids in, token ids out, across losses of the server."""

from surestep_common.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelChanged,
    ModelFault,
    PermissionDenied,
    QueueFull,
    RequestTooLarge,
    SurestepError,
    Unauthenticated,
    Unavailable,
)
from surestep_proto.sampling_pb2 import LogprobColumns, SamplingParams, TokenSequence
from surestep_proto.scheduler_pb2 import GenerateChunk, SchedulerInfo

from .asynchronous import AsyncClient
from .blocking import Client
from .completion import Completion
from .connection import Tls
from .request import Options

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Client",
    "Completion",
    "ConnectionLost",
    "DeadlineExceeded",
    "GenerateChunk",
    "InternalError",
    "InvalidRequest",
    "LogprobColumns",
    "ModelChanged",
    "ModelFault",
    "Options",
    "PermissionDenied",
    "QueueFull",
    "RequestTooLarge",
    "SamplingParams",
    "SchedulerInfo",
    "SurestepError",
    "Tls",
    "TokenSequence",
    "Unauthenticated",
    "Unavailable",
]
