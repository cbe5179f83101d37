from surestep_proto import sampling_pb2 as _sampling_pb2
from surestep_proto import supervisor_pb2 as _supervisor_pb2
from surestep_proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
    POOLED: _ClassVar[FinishReason]
    ABORTED: _ClassVar[FinishReason]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    WAITING_FOR_WORKERS: _ClassVar[EngineState]
    SERVING: _ClassVar[EngineState]
    RECOVERING: _ClassVar[EngineState]
    DRAINING: _ClassVar[EngineState]
    PAUSED: _ClassVar[EngineState]
    SLEEPING: _ClassVar[EngineState]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_ABORT: _ClassVar[PauseMode]
    PAUSE_WAIT: _ClassVar[PauseMode]
    PAUSE_KEEP: _ClassVar[PauseMode]
FINISH_REASON_UNSPECIFIED: FinishReason
STOP: FinishReason
LENGTH: FinishReason
POOLED: FinishReason
ABORTED: FinishReason
ENGINE_STATE_UNSPECIFIED: EngineState
WAITING_FOR_WORKERS: EngineState
SERVING: EngineState
RECOVERING: EngineState
DRAINING: EngineState
PAUSED: EngineState
SLEEPING: EngineState
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_ABORT: PauseMode
PAUSE_WAIT: PauseMode
PAUSE_KEEP: PauseMode

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "in_place", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    in_place: bool
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., in_place: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "emitted_ids", "max_tokens", "sampling", "priority", "cache_salt", "num_draft_tokens", "tenant", "tenant_weight", "model_fingerprint", "pooling", "label_ids", "ignore_eos", "resolved", "want_drafted", "cache_owner", "adapter", "delivery")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    LABEL_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    WANT_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    CACHE_OWNER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: _sampling_pb2.SamplingParams
    priority: int
    cache_salt: str
    num_draft_tokens: int
    tenant: str
    tenant_weight: float
    model_fingerprint: str
    pooling: _sampling_pb2.Pooling
    label_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    resolved: ResolvedParams
    want_drafted: bool
    cache_owner: str
    adapter: str
    delivery: Delivery
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., emitted_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ..., model_fingerprint: _Optional[str] = ..., pooling: _Optional[_Union[_sampling_pb2.Pooling, str]] = ..., label_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., resolved: _Optional[_Union[ResolvedParams, _Mapping]] = ..., want_drafted: _Optional[bool] = ..., cache_owner: _Optional[str] = ..., adapter: _Optional[str] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("stream_id", "call")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    call: int
    def __init__(self, stream_id: _Optional[str] = ..., call: _Optional[int] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    def __init__(self, stream_id: _Optional[str] = ...) -> None: ...

class ChunkBatch(_message.Message):
    __slots__ = ("calls", "chunks")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedCompositeFieldContainer[GenerateChunk]
    def __init__(self, calls: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[_Union[GenerateChunk, _Mapping]]] = ...) -> None: ...

class ResolvedParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "presence_penalty", "frequency_penalty", "adapter_digest")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    presence_penalty: float
    frequency_penalty: float
    adapter_digest: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("token_ids", "start", "logprobs", "prompt_logprobs", "finish_reason", "end", "weights", "pooled", "drafted")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: RequestStart
    logprobs: _sampling_pb2.LogprobColumns
    prompt_logprobs: _sampling_pb2.LogprobColumns
    finish_reason: FinishReason
    end: RequestEnd
    weights: _containers.RepeatedCompositeFieldContainer[WeightsFrom]
    pooled: bytes
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[_Union[RequestStart, _Mapping]] = ..., logprobs: _Optional[_Union[_sampling_pb2.LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.LogprobColumns, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., end: _Optional[_Union[RequestEnd, _Mapping]] = ..., weights: _Optional[_Iterable[_Union[WeightsFrom, _Mapping]]] = ..., pooled: _Optional[bytes] = ..., drafted: _Optional[_Iterable[bool]] = ...) -> None: ...

class RequestStart(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s", "model_fingerprint", "resolved")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    model_fingerprint: str
    resolved: ResolvedParams
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., model_fingerprint: _Optional[str] = ..., resolved: _Optional[_Union[ResolvedParams, _Mapping]] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_replays")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    num_replays: int
    def __init__(self, num_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_replays: _Optional[int] = ...) -> None: ...

class SchedulerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SchedulerInfo(_message.Message):
    __slots__ = ("model_path", "vocab_size", "max_model_len", "max_num_seqs", "max_queue_len", "drafter", "max_draft_tokens", "eos_token_ids", "dtype", "device", "block_size", "num_blocks", "model_fingerprint", "defaults", "max_pooled_len", "hidden_size", "headless", "drafter_fault", "grammar_fault", "drafts_because", "speculative_config", "weight_version", "adapters", "max_loras", "loads_adapters", "draining")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    MAX_POOLED_LEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADLESS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAULT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FAULT_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    LOADS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue_len: int
    drafter: str
    max_draft_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    model_fingerprint: str
    defaults: _sampling_pb2.SamplingDefaults
    max_pooled_len: int
    hidden_size: int
    headless: bool
    drafter_fault: str
    grammar_fault: str
    drafts_because: str
    speculative_config: str
    weight_version: str
    adapters: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Adapter]
    max_loras: int
    loads_adapters: bool
    draining: bool
    def __init__(self, model_path: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_queue_len: _Optional[int] = ..., drafter: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., defaults: _Optional[_Union[_sampling_pb2.SamplingDefaults, _Mapping]] = ..., max_pooled_len: _Optional[int] = ..., hidden_size: _Optional[int] = ..., headless: _Optional[bool] = ..., drafter_fault: _Optional[str] = ..., grammar_fault: _Optional[str] = ..., drafts_because: _Optional[str] = ..., speculative_config: _Optional[str] = ..., weight_version: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[_worker_pb2.Adapter, _Mapping]]] = ..., max_loras: _Optional[int] = ..., loads_adapters: _Optional[bool] = ..., draining: _Optional[bool] = ...) -> None: ...

class SchedulerStatusRequest(_message.Message):
    __slots__ = ("num_steps",)
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    def __init__(self, num_steps: _Optional[int] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("pid", "address", "state", "epoch", "step", "last_step_age_s", "supervisors", "ranks", "incidents", "num_open_requests", "num_replaying_requests", "last_token_age_s", "waiting_for", "recent_steps")
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    SUPERVISORS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RECENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    address: str
    state: EngineState
    epoch: int
    step: int
    last_step_age_s: float
    supervisors: _containers.RepeatedCompositeFieldContainer[_supervisor_pb2.SupervisorStatus]
    ranks: _containers.RepeatedCompositeFieldContainer[_worker_pb2.WorkerInfo]
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    num_open_requests: int
    num_replaying_requests: int
    last_token_age_s: float
    waiting_for: str
    recent_steps: RecentSteps
    def __init__(self, pid: _Optional[int] = ..., address: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., last_step_age_s: _Optional[float] = ..., supervisors: _Optional[_Iterable[_Union[_supervisor_pb2.SupervisorStatus, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[_worker_pb2.WorkerInfo, _Mapping]]] = ..., incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ..., num_open_requests: _Optional[int] = ..., num_replaying_requests: _Optional[int] = ..., last_token_age_s: _Optional[float] = ..., waiting_for: _Optional[str] = ..., recent_steps: _Optional[_Union[RecentSteps, _Mapping]] = ...) -> None: ...

class RecentSteps(_message.Message):
    __slots__ = ("epoch", "step", "age_s", "took_s", "prompt_rows", "decode_rows", "verify_rows", "num_emitted", "num_accepted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    age_s: _containers.RepeatedScalarFieldContainer[float]
    took_s: _containers.RepeatedScalarFieldContainer[float]
    prompt_rows: _containers.RepeatedScalarFieldContainer[int]
    decode_rows: _containers.RepeatedScalarFieldContainer[int]
    verify_rows: _containers.RepeatedScalarFieldContainer[int]
    num_emitted: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., age_s: _Optional[_Iterable[float]] = ..., took_s: _Optional[_Iterable[float]] = ..., prompt_rows: _Optional[_Iterable[int]] = ..., decode_rows: _Optional[_Iterable[int]] = ..., verify_rows: _Optional[_Iterable[int]] = ..., num_emitted: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("cause", "reason", "epoch", "age_s", "detect_s", "recover_s", "num_replayed_requests", "num_replayed_tokens", "num_kept_tokens")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DETECT_S_FIELD_NUMBER: _ClassVar[int]
    RECOVER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    reason: str
    epoch: int
    age_s: float
    detect_s: float
    recover_s: float
    num_replayed_requests: int
    num_replayed_tokens: int
    num_kept_tokens: int
    def __init__(self, cause: _Optional[str] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., age_s: _Optional[float] = ..., detect_s: _Optional[float] = ..., recover_s: _Optional[float] = ..., num_replayed_requests: _Optional[int] = ..., num_replayed_tokens: _Optional[int] = ..., num_kept_tokens: _Optional[int] = ...) -> None: ...

class RestartWorkersRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RestartWorkersResponse(_message.Message):
    __slots__ = ("epoch", "num_ranks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_ranks: int
    def __init__(self, epoch: _Optional[int] = ..., num_ranks: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("level", "mode", "tags", "clear_cache")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: PauseMode
    tags: _containers.RepeatedScalarFieldContainer[str]
    clear_cache: bool
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., tags: _Optional[_Iterable[str]] = ..., clear_cache: _Optional[bool] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("num_aborted", "held_weight_bytes")
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    HELD_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    held_weight_bytes: int
    def __init__(self, num_aborted: _Optional[int] = ..., held_weight_bytes: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("asleep", "epoch")
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    asleep: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    def __init__(self, asleep: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("version", "mode")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    version: str
    mode: PauseMode
    def __init__(self, version: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("epoch", "num_aborted", "num_kept", "unchanged", "check_drafts", "check_accepted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    CHECK_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_aborted: int
    num_kept: int
    unchanged: bool
    check_drafts: int
    check_accepted: int
    def __init__(self, epoch: _Optional[int] = ..., num_aborted: _Optional[int] = ..., num_kept: _Optional[int] = ..., unchanged: _Optional[bool] = ..., check_drafts: _Optional[int] = ..., check_accepted: _Optional[int] = ...) -> None: ...

class WeightsFrom(_message.Message):
    __slots__ = ("first_token", "version", "model_fingerprint")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    version: str
    model_fingerprint: str
    def __init__(self, first_token: _Optional[int] = ..., version: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class PauseInfo(_message.Message):
    __slots__ = ("level", "mode", "asleep")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: PauseMode
    asleep: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ..., asleep: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SchedulerStats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks_total", "num_blocks_used", "num_slots_used", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_rejected_requests", "num_steps", "num_epochs", "num_replayed_requests", "num_step_deadlines_exceeded", "num_aborted_requests", "finished_requests", "step_time_p50_s", "step_time_p99_s", "num_snapshot_queries", "num_snapshot_hits", "num_snapshots_taken", "num_snapshot_evictions", "speculation_suspended", "num_speculation_suspensions", "step_gap_p50_s", "step_gap_p99_s", "num_check_draft_tokens", "num_check_accepted_tokens", "num_incidents", "detect_s_sum", "recover_s_sum", "num_recoveries", "num_replayed_tokens", "num_fenced_messages", "num_drafter_faults", "num_poisoned_requests", "num_canaries", "last_token_age_s", "num_queued_tokens", "drafter_broken", "num_tenants", "num_displacements", "num_prompt_tokens_cached", "num_step_tokens", "num_steps_by_tokens", "steps", "num_blocks_cached", "num_slots_total", "num_snapshots_total", "num_snapshots_held", "drafting", "adapters", "pause", "num_tier_queries", "num_tier_hits", "num_tier_stored_blocks", "num_prompt_tokens_loaded", "num_kv_event_batches", "num_kv_event_batches_dropped")
    class FinishedRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumIncidentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumStepsByTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_DEADLINES_EXCEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_P50_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_P99_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOT_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATION_SUSPENSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_GAP_P50_S_FIELD_NUMBER: _ClassVar[int]
    STEP_GAP_P99_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECK_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECK_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    DETECT_S_SUM_FIELD_NUMBER: _ClassVar[int]
    RECOVER_S_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FENCED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTER_FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_POISONED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANARIES_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_BROKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISPLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_BY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_LOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_EVENT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_EVENT_BATCHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks_total: int
    num_blocks_used: int
    num_slots_used: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    num_rejected_requests: int
    num_steps: int
    num_epochs: int
    num_replayed_requests: int
    num_step_deadlines_exceeded: int
    num_aborted_requests: int
    finished_requests: _containers.ScalarMap[str, int]
    step_time_p50_s: float
    step_time_p99_s: float
    num_snapshot_queries: int
    num_snapshot_hits: int
    num_snapshots_taken: int
    num_snapshot_evictions: int
    speculation_suspended: bool
    num_speculation_suspensions: int
    step_gap_p50_s: float
    step_gap_p99_s: float
    num_check_draft_tokens: int
    num_check_accepted_tokens: int
    num_incidents: _containers.ScalarMap[str, int]
    detect_s_sum: float
    recover_s_sum: float
    num_recoveries: int
    num_replayed_tokens: int
    num_fenced_messages: int
    num_drafter_faults: int
    num_poisoned_requests: int
    num_canaries: int
    last_token_age_s: float
    num_queued_tokens: int
    drafter_broken: bool
    num_tenants: int
    num_displacements: int
    num_prompt_tokens_cached: int
    num_step_tokens: int
    num_steps_by_tokens: _containers.ScalarMap[int, int]
    steps: StepStats
    num_blocks_cached: int
    num_slots_total: int
    num_snapshots_total: int
    num_snapshots_held: int
    drafting: _containers.RepeatedCompositeFieldContainer[DraftingValue]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterLoad]
    pause: PauseInfo
    num_tier_queries: int
    num_tier_hits: int
    num_tier_stored_blocks: int
    num_prompt_tokens_loaded: int
    num_kv_event_batches: int
    num_kv_event_batches_dropped: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_slots_used: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ..., num_rejected_requests: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_epochs: _Optional[int] = ..., num_replayed_requests: _Optional[int] = ..., num_step_deadlines_exceeded: _Optional[int] = ..., num_aborted_requests: _Optional[int] = ..., finished_requests: _Optional[_Mapping[str, int]] = ..., step_time_p50_s: _Optional[float] = ..., step_time_p99_s: _Optional[float] = ..., num_snapshot_queries: _Optional[int] = ..., num_snapshot_hits: _Optional[int] = ..., num_snapshots_taken: _Optional[int] = ..., num_snapshot_evictions: _Optional[int] = ..., speculation_suspended: _Optional[bool] = ..., num_speculation_suspensions: _Optional[int] = ..., step_gap_p50_s: _Optional[float] = ..., step_gap_p99_s: _Optional[float] = ..., num_check_draft_tokens: _Optional[int] = ..., num_check_accepted_tokens: _Optional[int] = ..., num_incidents: _Optional[_Mapping[str, int]] = ..., detect_s_sum: _Optional[float] = ..., recover_s_sum: _Optional[float] = ..., num_recoveries: _Optional[int] = ..., num_replayed_tokens: _Optional[int] = ..., num_fenced_messages: _Optional[int] = ..., num_drafter_faults: _Optional[int] = ..., num_poisoned_requests: _Optional[int] = ..., num_canaries: _Optional[int] = ..., last_token_age_s: _Optional[float] = ..., num_queued_tokens: _Optional[int] = ..., drafter_broken: _Optional[bool] = ..., num_tenants: _Optional[int] = ..., num_displacements: _Optional[int] = ..., num_prompt_tokens_cached: _Optional[int] = ..., num_step_tokens: _Optional[int] = ..., num_steps_by_tokens: _Optional[_Mapping[int, int]] = ..., steps: _Optional[_Union[StepStats, _Mapping]] = ..., num_blocks_cached: _Optional[int] = ..., num_slots_total: _Optional[int] = ..., num_snapshots_total: _Optional[int] = ..., num_snapshots_held: _Optional[int] = ..., drafting: _Optional[_Iterable[_Union[DraftingValue, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[AdapterLoad, _Mapping]]] = ..., pause: _Optional[_Union[PauseInfo, _Mapping]] = ..., num_tier_queries: _Optional[int] = ..., num_tier_hits: _Optional[int] = ..., num_tier_stored_blocks: _Optional[int] = ..., num_prompt_tokens_loaded: _Optional[int] = ..., num_kv_event_batches: _Optional[int] = ..., num_kv_event_batches_dropped: _Optional[int] = ...) -> None: ...

class AdapterLoad(_message.Message):
    __slots__ = ("name", "num_running", "num_waiting", "digest", "leaving")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_running: int
    num_waiting: int
    digest: str
    leaving: bool
    def __init__(self, name: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., digest: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class DraftingValue(_message.Message):
    __slots__ = ("rows", "value", "drafts", "time_factor", "num_trials", "source")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TIME_FACTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIALS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    rows: int
    value: float
    drafts: bool
    time_factor: float
    num_trials: int
    source: str
    def __init__(self, rows: _Optional[int] = ..., value: _Optional[float] = ..., drafts: _Optional[bool] = ..., time_factor: _Optional[float] = ..., num_trials: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class StepStats(_message.Message):
    __slots__ = ("num_steps_by_mode", "num_rows_by_mode", "num_rows_by_k", "num_windows_by_drafts", "num_windows_by_accepted", "num_checked_rows", "num_checked_digests", "plan_s", "apply_s", "bounds_s", "num_steps_within", "step_s", "ranks")
    class NumStepsByModeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumRowsByModeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_STEPS_BY_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_BY_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_BY_K_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOWS_BY_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOWS_BY_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKED_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_WITHIN_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    num_steps_by_mode: _containers.ScalarMap[str, int]
    num_rows_by_mode: _containers.ScalarMap[str, int]
    num_rows_by_k: _containers.RepeatedScalarFieldContainer[int]
    num_windows_by_drafts: _containers.RepeatedScalarFieldContainer[int]
    num_windows_by_accepted: _containers.RepeatedScalarFieldContainer[int]
    num_checked_rows: int
    num_checked_digests: int
    plan_s: float
    apply_s: float
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    num_steps_within: _containers.RepeatedScalarFieldContainer[int]
    step_s: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankSeconds]
    def __init__(self, num_steps_by_mode: _Optional[_Mapping[str, int]] = ..., num_rows_by_mode: _Optional[_Mapping[str, int]] = ..., num_rows_by_k: _Optional[_Iterable[int]] = ..., num_windows_by_drafts: _Optional[_Iterable[int]] = ..., num_windows_by_accepted: _Optional[_Iterable[int]] = ..., num_checked_rows: _Optional[int] = ..., num_checked_digests: _Optional[int] = ..., plan_s: _Optional[float] = ..., apply_s: _Optional[float] = ..., bounds_s: _Optional[_Iterable[float]] = ..., num_steps_within: _Optional[_Iterable[int]] = ..., step_s: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankSeconds, _Mapping]]] = ...) -> None: ...

class RankSeconds(_message.Message):
    __slots__ = ("queue_s", "prepare_s", "draft_s", "forward_s", "verify_s", "bubble_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prepare_s: float
    draft_s: float
    forward_s: float
    verify_s: float
    bubble_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prepare_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., bubble_s: _Optional[float] = ...) -> None: ...
