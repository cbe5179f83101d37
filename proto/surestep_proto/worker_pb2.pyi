from surestep_proto import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECODE_MODE_UNSPECIFIED: _ClassVar[DecodeMode]
    PREFILL: _ClassVar[DecodeMode]
    PREFILL_LAST: _ClassVar[DecodeMode]
    DECODE: _ClassVar[DecodeMode]
    VERIFY: _ClassVar[DecodeMode]
    POOL: _ClassVar[DecodeMode]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    OK: _ClassVar[RowStatus]
    NON_FINITE: _ClassVar[RowStatus]
    NO_CANDIDATE: _ClassVar[RowStatus]
    SHAPING_OVERFLOW: _ClassVar[RowStatus]

class TierAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_ACTION_UNSPECIFIED: _ClassVar[TierAction]
    LOOK_UP: _ClassVar[TierAction]
    LOAD: _ClassVar[TierAction]
    STORE: _ClassVar[TierAction]
    FORGET: _ClassVar[TierAction]
DECODE_MODE_UNSPECIFIED: DecodeMode
PREFILL: DecodeMode
PREFILL_LAST: DecodeMode
DECODE: DecodeMode
VERIFY: DecodeMode
POOL: DecodeMode
ROW_STATUS_UNSPECIFIED: RowStatus
OK: RowStatus
NON_FINITE: RowStatus
NO_CANDIDATE: RowStatus
SHAPING_OVERFLOW: RowStatus
TIER_ACTION_UNSPECIFIED: TierAction
LOOK_UP: TierAction
LOAD: TierAction
STORE: TierAction
FORGET: TierAction

class Adapter(_message.Message):
    __slots__ = ("name", "place", "path", "digest", "rank", "only_check")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ONLY_CHECK_FIELD_NUMBER: _ClassVar[int]
    name: str
    place: int
    path: str
    digest: str
    rank: int
    only_check: bool
    def __init__(self, name: _Optional[str] = ..., place: _Optional[int] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., only_check: _Optional[bool] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompileRequest(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: _sampling_pb2.Grammar
    def __init__(self, grammar: _Optional[_Union[_sampling_pb2.Grammar, _Mapping]] = ...) -> None: ...

class CompileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("epoch", "step", "budget_ms", "freed_slots", "freed_slot_epochs", "admissions", "extend_slots", "extend_counts", "block_ids", "slot", "slot_epoch", "mode", "num_tokens", "len_lo", "len_hi", "max_drafts", "max_proposed", "max_looked_up", "accepted_step", "accepted", "depends_on_step", "catch_up", "snapshot_slots", "snapshot_lens", "snapshot_ids", "drafter_faults", "capture", "extend_groups", "release_slots", "release_groups", "release_counts", "adapter", "planner", "kept")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREED_SLOT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    EXTEND_SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXTEND_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEN_LO_FIELD_NUMBER: _ClassVar[int]
    LEN_HI_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    MAX_LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEPENDS_ON_STEP_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LENS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAULTS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    EXTEND_GROUPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    budget_ms: int
    freed_slots: _containers.RepeatedScalarFieldContainer[int]
    freed_slot_epochs: _containers.RepeatedScalarFieldContainer[int]
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    extend_slots: _containers.RepeatedScalarFieldContainer[int]
    extend_counts: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    slot: _containers.RepeatedScalarFieldContainer[int]
    slot_epoch: _containers.RepeatedScalarFieldContainer[int]
    mode: _containers.RepeatedScalarFieldContainer[DecodeMode]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    len_lo: _containers.RepeatedScalarFieldContainer[int]
    len_hi: _containers.RepeatedScalarFieldContainer[int]
    max_drafts: _containers.RepeatedScalarFieldContainer[int]
    max_proposed: _containers.RepeatedScalarFieldContainer[int]
    max_looked_up: _containers.RepeatedScalarFieldContainer[int]
    accepted_step: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    depends_on_step: _containers.RepeatedScalarFieldContainer[int]
    catch_up: _containers.RepeatedScalarFieldContainer[int]
    snapshot_slots: _containers.RepeatedScalarFieldContainer[int]
    snapshot_lens: _containers.RepeatedScalarFieldContainer[int]
    snapshot_ids: _containers.RepeatedScalarFieldContainer[int]
    drafter_faults: int
    capture: int
    extend_groups: _containers.RepeatedScalarFieldContainer[int]
    release_slots: _containers.RepeatedScalarFieldContainer[int]
    release_groups: _containers.RepeatedScalarFieldContainer[int]
    release_counts: _containers.RepeatedScalarFieldContainer[int]
    adapter: _containers.RepeatedScalarFieldContainer[int]
    planner: int
    kept: KeptCaches
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., budget_ms: _Optional[int] = ..., freed_slots: _Optional[_Iterable[int]] = ..., freed_slot_epochs: _Optional[_Iterable[int]] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., extend_slots: _Optional[_Iterable[int]] = ..., extend_counts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., slot: _Optional[_Iterable[int]] = ..., slot_epoch: _Optional[_Iterable[int]] = ..., mode: _Optional[_Iterable[_Union[DecodeMode, str]]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., len_lo: _Optional[_Iterable[int]] = ..., len_hi: _Optional[_Iterable[int]] = ..., max_drafts: _Optional[_Iterable[int]] = ..., max_proposed: _Optional[_Iterable[int]] = ..., max_looked_up: _Optional[_Iterable[int]] = ..., accepted_step: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., depends_on_step: _Optional[_Iterable[int]] = ..., catch_up: _Optional[_Iterable[int]] = ..., snapshot_slots: _Optional[_Iterable[int]] = ..., snapshot_lens: _Optional[_Iterable[int]] = ..., snapshot_ids: _Optional[_Iterable[int]] = ..., drafter_faults: _Optional[int] = ..., capture: _Optional[int] = ..., extend_groups: _Optional[_Iterable[int]] = ..., release_slots: _Optional[_Iterable[int]] = ..., release_groups: _Optional[_Iterable[int]] = ..., release_counts: _Optional[_Iterable[int]] = ..., adapter: _Optional[_Iterable[int]] = ..., planner: _Optional[int] = ..., kept: _Optional[_Union[KeptCaches, _Mapping]] = ...) -> None: ...

class KeptCaches(_message.Message):
    __slots__ = ("planner", "epoch", "blocks", "drafted", "snapshot_ids", "snapshot_lens")
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LENS_FIELD_NUMBER: _ClassVar[int]
    planner: int
    epoch: int
    blocks: bytes
    drafted: bytes
    snapshot_ids: _containers.RepeatedScalarFieldContainer[int]
    snapshot_lens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, planner: _Optional[int] = ..., epoch: _Optional[int] = ..., blocks: _Optional[bytes] = ..., drafted: _Optional[bytes] = ..., snapshot_ids: _Optional[_Iterable[int]] = ..., snapshot_lens: _Optional[_Iterable[int]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("slot", "slot_epoch", "request_id", "token_ids", "prompt_len", "num_cached", "max_len", "sampling", "snapshot_id", "drafter_len", "text_group", "adapter", "adapter_digest", "pooling", "label_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_GROUP_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    LABEL_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_epoch: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    num_cached: int
    max_len: int
    sampling: _sampling_pb2.SamplingParams
    snapshot_id: int
    drafter_len: int
    text_group: int
    adapter: int
    adapter_digest: str
    pooling: _sampling_pb2.Pooling
    label_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., slot_epoch: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., num_cached: _Optional[int] = ..., max_len: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., snapshot_id: _Optional[int] = ..., drafter_len: _Optional[int] = ..., text_group: _Optional[int] = ..., adapter: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., pooling: _Optional[_Union[_sampling_pb2.Pooling, str]] = ..., label_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step", "rank", "digest", "timings", "slot", "slot_epoch", "status", "len_before", "n_drafts", "n_accepted", "n_emitted", "token_ids", "drafter_len", "snapshot_ids_taken", "drafter_faults", "drafter_skipped", "draft_non_finite_rows", "logprobs", "prompt_logprobs", "pooled_rows", "pooled", "missed_kind", "n_forced", "n_looked_up", "grammar_fault_rows", "grammar_faults")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LEN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    N_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    N_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    N_EMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_IDS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAULTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NON_FINITE_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    MISSED_KIND_FIELD_NUMBER: _ClassVar[int]
    N_FORCED_FIELD_NUMBER: _ClassVar[int]
    N_LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FAULT_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FAULTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    rank: int
    digest: int
    timings: Timings
    slot: _containers.RepeatedScalarFieldContainer[int]
    slot_epoch: _containers.RepeatedScalarFieldContainer[int]
    status: _containers.RepeatedScalarFieldContainer[RowStatus]
    len_before: _containers.RepeatedScalarFieldContainer[int]
    n_drafts: _containers.RepeatedScalarFieldContainer[int]
    n_accepted: _containers.RepeatedScalarFieldContainer[int]
    n_emitted: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafter_len: _containers.RepeatedScalarFieldContainer[int]
    snapshot_ids_taken: _containers.RepeatedScalarFieldContainer[int]
    drafter_faults: int
    drafter_skipped: bool
    draft_non_finite_rows: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _sampling_pb2.LogprobColumns
    prompt_logprobs: _sampling_pb2.LogprobColumns
    pooled_rows: _containers.RepeatedScalarFieldContainer[int]
    pooled: _containers.RepeatedScalarFieldContainer[bytes]
    missed_kind: int
    n_forced: _containers.RepeatedScalarFieldContainer[int]
    n_looked_up: _containers.RepeatedScalarFieldContainer[int]
    grammar_fault_rows: _containers.RepeatedScalarFieldContainer[int]
    grammar_faults: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., digest: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., slot: _Optional[_Iterable[int]] = ..., slot_epoch: _Optional[_Iterable[int]] = ..., status: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., len_before: _Optional[_Iterable[int]] = ..., n_drafts: _Optional[_Iterable[int]] = ..., n_accepted: _Optional[_Iterable[int]] = ..., n_emitted: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafter_len: _Optional[_Iterable[int]] = ..., snapshot_ids_taken: _Optional[_Iterable[int]] = ..., drafter_faults: _Optional[int] = ..., drafter_skipped: _Optional[bool] = ..., draft_non_finite_rows: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_sampling_pb2.LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.LogprobColumns, _Mapping]] = ..., pooled_rows: _Optional[_Iterable[int]] = ..., pooled: _Optional[_Iterable[bytes]] = ..., missed_kind: _Optional[int] = ..., n_forced: _Optional[_Iterable[int]] = ..., n_looked_up: _Optional[_Iterable[int]] = ..., grammar_fault_rows: _Optional[_Iterable[int]] = ..., grammar_faults: _Optional[_Iterable[str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_us", "prepare_us", "forward_us", "sample_us", "gap_us", "draft_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREPARE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    GAP_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    prepare_us: int
    forward_us: int
    sample_us: int
    gap_us: int
    draft_us: int
    def __init__(self, queue_us: _Optional[int] = ..., prepare_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ..., gap_us: _Optional[int] = ..., draft_us: _Optional[int] = ...) -> None: ...

class TierOrder(_message.Message):
    __slots__ = ("epoch", "number", "action", "timeout_ms", "keys", "groups", "blocks", "drafted", "snapshot_keys", "snapshot_lens", "snapshot_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_KEYS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LENS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    action: TierAction
    timeout_ms: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    groups: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    drafted: bytes
    snapshot_keys: _containers.RepeatedScalarFieldContainer[bytes]
    snapshot_lens: _containers.RepeatedScalarFieldContainer[int]
    snapshot_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., action: _Optional[_Union[TierAction, str]] = ..., timeout_ms: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., groups: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., drafted: _Optional[bytes] = ..., snapshot_keys: _Optional[_Iterable[bytes]] = ..., snapshot_lens: _Optional[_Iterable[int]] = ..., snapshot_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TierAnswer(_message.Message):
    __slots__ = ("epoch", "number", "blocks", "drafted", "snapshots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    blocks: bytes
    drafted: bytes
    snapshots: bytes
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., blocks: _Optional[bytes] = ..., drafted: _Optional[bytes] = ..., snapshots: _Optional[bytes] = ...) -> None: ...

class WorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("rank", "world_size", "pid", "instance_id", "model_path", "architecture", "dtype", "device", "vocab_size", "max_model_len", "num_slots", "num_blocks", "block_size", "max_step_tokens", "drafter", "max_draft_tokens", "last_epoch", "last_step_age_s", "last_step", "eos_token_ids", "kv_cache_bytes", "weight_bytes", "drafter_has_state", "drafter_looks_up", "drafter_recurrent", "recurrent", "num_snapshots", "state_bytes_per_slot", "costs", "check_drafts", "check_accepted", "drafter_fault", "draft_layers", "late_compilations", "captured_shapes", "uncaptured_steps", "model_fingerprint", "stream_error", "hidden_size", "headless", "prompt_chunk", "linear_backend", "weight_version", "programmatic_dependent_launch", "kv_windows", "defaults", "memory", "max_forced_drafts", "grammar_fault", "speculative_config", "drafts_because", "max_loras", "max_lora_rank", "adapters", "kept", "tiers")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LOOKS_UP_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_RECURRENT_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAULT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LATE_COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_SHAPES_FIELD_NUMBER: _ClassVar[int]
    UNCAPTURED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STREAM_ERROR_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADLESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    LINEAR_BACKEND_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRAMMATIC_DEPENDENT_LAUNCH_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MAX_FORCED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FAULT_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    pid: int
    instance_id: str
    model_path: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_slots: int
    num_blocks: int
    block_size: int
    max_step_tokens: int
    drafter: str
    max_draft_tokens: int
    last_epoch: int
    last_step_age_s: float
    last_step: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache_bytes: int
    weight_bytes: int
    drafter_has_state: bool
    drafter_looks_up: bool
    drafter_recurrent: bool
    recurrent: bool
    num_snapshots: int
    state_bytes_per_slot: int
    costs: StepCosts
    check_drafts: int
    check_accepted: int
    drafter_fault: str
    draft_layers: _containers.RepeatedScalarFieldContainer[int]
    late_compilations: int
    captured_shapes: int
    uncaptured_steps: int
    model_fingerprint: str
    stream_error: StreamError
    hidden_size: int
    headless: bool
    prompt_chunk: int
    linear_backend: str
    weight_version: str
    programmatic_dependent_launch: bool
    kv_windows: _containers.RepeatedScalarFieldContainer[int]
    defaults: _sampling_pb2.SamplingDefaults
    memory: DeviceMemory
    max_forced_drafts: int
    grammar_fault: str
    speculative_config: str
    drafts_because: str
    max_loras: int
    max_lora_rank: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    kept: KeptCaches
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., pid: _Optional[int] = ..., instance_id: _Optional[str] = ..., model_path: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., last_epoch: _Optional[int] = ..., last_step_age_s: _Optional[float] = ..., last_step: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_cache_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., drafter_has_state: _Optional[bool] = ..., drafter_looks_up: _Optional[bool] = ..., drafter_recurrent: _Optional[bool] = ..., recurrent: _Optional[bool] = ..., num_snapshots: _Optional[int] = ..., state_bytes_per_slot: _Optional[int] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., check_drafts: _Optional[int] = ..., check_accepted: _Optional[int] = ..., drafter_fault: _Optional[str] = ..., draft_layers: _Optional[_Iterable[int]] = ..., late_compilations: _Optional[int] = ..., captured_shapes: _Optional[int] = ..., uncaptured_steps: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., stream_error: _Optional[_Union[StreamError, _Mapping]] = ..., hidden_size: _Optional[int] = ..., headless: _Optional[bool] = ..., prompt_chunk: _Optional[int] = ..., linear_backend: _Optional[str] = ..., weight_version: _Optional[str] = ..., programmatic_dependent_launch: _Optional[bool] = ..., kv_windows: _Optional[_Iterable[int]] = ..., defaults: _Optional[_Union[_sampling_pb2.SamplingDefaults, _Mapping]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., max_forced_drafts: _Optional[int] = ..., grammar_fault: _Optional[str] = ..., speculative_config: _Optional[str] = ..., drafts_because: _Optional[str] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., kept: _Optional[_Union[KeptCaches, _Mapping]] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfileResult(_message.Message):
    __slots__ = ("costs", "check_drafts", "check_accepted", "drafter_fault", "draft_layers", "num_blocks", "num_snapshots", "linear_backend", "memory", "speculative_config", "drafts_because")
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAULT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_BACKEND_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    costs: StepCosts
    check_drafts: int
    check_accepted: int
    drafter_fault: str
    draft_layers: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: int
    num_snapshots: int
    linear_backend: str
    memory: DeviceMemory
    speculative_config: str
    drafts_because: str
    def __init__(self, costs: _Optional[_Union[StepCosts, _Mapping]] = ..., check_drafts: _Optional[int] = ..., check_accepted: _Optional[int] = ..., drafter_fault: _Optional[str] = ..., draft_layers: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[int] = ..., num_snapshots: _Optional[int] = ..., linear_backend: _Optional[str] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., speculative_config: _Optional[str] = ..., drafts_because: _Optional[str] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("total", "limit", "weights", "states", "graphs", "step", "caches")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    total: int
    limit: int
    weights: int
    states: int
    graphs: int
    step: int
    caches: int
    def __init__(self, total: _Optional[int] = ..., limit: _Optional[int] = ..., weights: _Optional[int] = ..., states: _Optional[int] = ..., graphs: _Optional[int] = ..., step: _Optional[int] = ..., caches: _Optional[int] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("epoch", "code", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    code: str
    message: str
    def __init__(self, epoch: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("tokens", "step_us", "us_per_context_token", "draft_rows", "draft_us", "drafts_at_once")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    US_PER_CONTEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    step_us: _containers.RepeatedScalarFieldContainer[float]
    us_per_context_token: float
    draft_rows: _containers.RepeatedScalarFieldContainer[int]
    draft_us: _containers.RepeatedScalarFieldContainer[float]
    drafts_at_once: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., step_us: _Optional[_Iterable[float]] = ..., us_per_context_token: _Optional[float] = ..., draft_rows: _Optional[_Iterable[int]] = ..., draft_us: _Optional[_Iterable[float]] = ..., drafts_at_once: _Optional[bool] = ...) -> None: ...
