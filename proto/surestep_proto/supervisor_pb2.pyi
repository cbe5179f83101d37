from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    LOADING: _ClassVar[Phase]
    WARMING_UP: _ClassVar[Phase]
    IDLE: _ClassVar[Phase]
    PREPARING: _ClassVar[Phase]
    DRAFTING: _ClassVar[Phase]
    FORWARD: _ClassVar[Phase]
    SAMPLING: _ClassVar[Phase]
    COMPILING: _ClassVar[Phase]

class ExitCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXIT_CAUSE_UNSPECIFIED: _ClassVar[ExitCause]
    EXITED: _ClassVar[ExitCause]
    KILLED: _ClassVar[ExitCause]
    HUNG: _ClassVar[ExitCause]
    REQUESTED: _ClassVar[ExitCause]
    OUT_OF_MEMORY: _ClassVar[ExitCause]
    UNSEEN: _ClassVar[ExitCause]

class RankState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_STATE_UNSPECIFIED: _ClassVar[RankState]
    STARTING: _ClassVar[RankState]
    READY: _ClassVar[RankState]
    DEAD: _ClassVar[RankState]
    ASLEEP: _ClassVar[RankState]

class Activity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVITY_UNKNOWN: _ClassVar[Activity]
    AT_REST: _ClassVar[Activity]
    RUNNING: _ClassVar[Activity]
    WAITING: _ClassVar[Activity]
    AWAITING_COMPILER: _ClassVar[Activity]
PHASE_UNSPECIFIED: Phase
LOADING: Phase
WARMING_UP: Phase
IDLE: Phase
PREPARING: Phase
DRAFTING: Phase
FORWARD: Phase
SAMPLING: Phase
COMPILING: Phase
EXIT_CAUSE_UNSPECIFIED: ExitCause
EXITED: ExitCause
KILLED: ExitCause
HUNG: ExitCause
REQUESTED: ExitCause
OUT_OF_MEMORY: ExitCause
UNSEEN: ExitCause
RANK_STATE_UNSPECIFIED: RankState
STARTING: RankState
READY: RankState
DEAD: RankState
ASLEEP: RankState
ACTIVITY_UNKNOWN: Activity
AT_REST: Activity
RUNNING: Activity
WAITING: Activity
AWAITING_COMPILER: Activity

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "step", "phase", "age_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    phase: Phase
    age_s: float
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., age_s: _Optional[float] = ...) -> None: ...

class RankExit(_message.Message):
    __slots__ = ("pid", "cause", "reason", "last", "age_s", "replaced_s", "signal", "outside")
    PID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REPLACED_S_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    cause: ExitCause
    reason: str
    last: Heartbeat
    age_s: float
    replaced_s: float
    signal: int
    outside: bool
    def __init__(self, pid: _Optional[int] = ..., cause: _Optional[_Union[ExitCause, str]] = ..., reason: _Optional[str] = ..., last: _Optional[_Union[Heartbeat, _Mapping]] = ..., age_s: _Optional[float] = ..., replaced_s: _Optional[float] = ..., signal: _Optional[int] = ..., outside: _Optional[bool] = ...) -> None: ...

class SupervisorStatusRequest(_message.Message):
    __slots__ = ("watch_ms",)
    WATCH_MS_FIELD_NUMBER: _ClassVar[int]
    watch_ms: int
    def __init__(self, watch_ms: _Optional[int] = ...) -> None: ...

class SupervisorStatus(_message.Message):
    __slots__ = ("pid", "rank", "rank_state", "rank_pid", "rank_address", "restarts", "last_exit", "address", "heartbeat", "exits", "standby_pid", "held_weight_bytes", "failure", "activity", "failure_is_permanent", "sleep_level", "weight_version", "weights_unsettled", "num_failures")
    PID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_STATE_FIELD_NUMBER: _ClassVar[int]
    RANK_PID_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_EXIT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    EXITS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_PID_FIELD_NUMBER: _ClassVar[int]
    HELD_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_IS_PERMANENT_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    rank: int
    rank_state: RankState
    rank_pid: int
    rank_address: str
    restarts: int
    last_exit: str
    address: str
    heartbeat: Heartbeat
    exits: _containers.RepeatedCompositeFieldContainer[RankExit]
    standby_pid: int
    held_weight_bytes: int
    failure: str
    activity: Activity
    failure_is_permanent: bool
    sleep_level: int
    weight_version: str
    weights_unsettled: bool
    num_failures: int
    def __init__(self, pid: _Optional[int] = ..., rank: _Optional[int] = ..., rank_state: _Optional[_Union[RankState, str]] = ..., rank_pid: _Optional[int] = ..., rank_address: _Optional[str] = ..., restarts: _Optional[int] = ..., last_exit: _Optional[str] = ..., address: _Optional[str] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., exits: _Optional[_Iterable[_Union[RankExit, _Mapping]]] = ..., standby_pid: _Optional[int] = ..., held_weight_bytes: _Optional[int] = ..., failure: _Optional[str] = ..., activity: _Optional[_Union[Activity, str]] = ..., failure_is_permanent: _Optional[bool] = ..., sleep_level: _Optional[int] = ..., weight_version: _Optional[str] = ..., weights_unsettled: _Optional[bool] = ..., num_failures: _Optional[int] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("reason", "expected_pid")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    expected_pid: int
    def __init__(self, reason: _Optional[str] = ..., expected_pid: _Optional[int] = ...) -> None: ...

class RestartResponse(_message.Message):
    __slots__ = ("restarted",)
    RESTARTED_FIELD_NUMBER: _ClassVar[int]
    restarted: bool
    def __init__(self, restarted: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("held_weight_bytes",)
    HELD_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    held_weight_bytes: int
    def __init__(self, held_weight_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightPart(_message.Message):
    __slots__ = ("first", "path", "data")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first: bool
    path: str
    data: bytes
    def __init__(self, first: _Optional[bool] = ..., path: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class StagedWeights(_message.Message):
    __slots__ = ("num_tensors", "nbytes", "digest")
    NUM_TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tensors: int
    nbytes: int
    digest: str
    def __init__(self, num_tensors: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class UseWeightsRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class UseWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SettleWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SettleWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollBackWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollBackWeightsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...
