"""Settings of a worker: the supervisor of one rank and the rank itself read the same ones."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import SettingsConfigDict
from surestep_common import addresses
from surestep_common.access import is_local
from surestep_common.config import Count, gpus_are_hidden
from surestep_common.gguf import ModelPath
from surestep_common.model_files import OVERRIDES_OF_GATEWAY

from surestep_worker.checkpoint.model_folder import Replacements
from surestep_worker.configs.generation_config import AUTO, NEUTRAL, check_override
from surestep_worker.configs.offloading import OffloadingSettings

GPU = Path("/dev/nvidiactl")
_OTHER_GPUS = (Path("/dev/dxg"), Path("/dev/nvmap"))  # of WSL, of boards with memory in common
HOST_PORT = r"^[^\s:]+:\d{1,5}$"  # of torch's rendezvous

_CPU_STEP_TOKENS = 512  # a long prompt is done as soon as by 2048 and holds others up for less long
_CPU_STEP_TOKENS_PER_SEQ = 4  # so that prompts advance beside the windows of all

_ATTENTION = {"triton_attn": "triton", "torch_sdpa": "torch"}  # vLLM's names
_DTYPES = {
    **dict.fromkeys(("half", "fp16"), "float16"),
    **dict.fromkeys(("float", "fp32"), "float32"),
    "bf16": "bfloat16",
}  # other names of them


def _own_length(value: Any) -> Any:
    return None if value in (-1, "-1", "auto") else value


def _speculation(value: Any) -> Any:
    return {"none": {}, "auto": None}.get(value, value) if isinstance(value, str) else value


def _attention(value: Any) -> Any:
    name = value.lower() if isinstance(value, str) else value
    return _ATTENTION.get(name, name)


def gpu_is_here() -> bool:
    """Return whether this machine has an NVIDIA GPU with a driver that the environment shows."""
    return GPU.exists() and not gpus_are_hidden()


def torch_has_cuda() -> bool:
    """Return whether the torch that is installed was built for it; asked without loading torch."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:  # not installed as others are: the rank will find out
        return True


def why_no_cuda() -> str | None:
    """Return why no rank here can have a CUDA device, as far as that is seen without torch."""
    if not torch_has_cuda():
        return f"torch {version('torch')} was built for CPUs"
    if gpus_are_hidden():
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if not any(device.exists() for device in (GPU, *_OTHER_GPUS)):
        return f"there is no {GPU}: no NVIDIA GPU, or no driver, or not in this container"
    return None


def _device(value: Any) -> Any:
    if value == "auto":
        return "cuda" if gpu_is_here() and torch_has_cuda() else "cpu"
    return value


def _dtype(value: Any) -> Any:
    name = _lower(value)
    return _DTYPES.get(name, name)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _implementation(value: Any) -> Any:
    return "surestep" if _lower(value) == "vllm" else _lower(value)


class ModelSettings(OffloadingSettings):
    """Settings of the model: what is read of it, what drafts for it, and the memory it gets."""

    model: ModelPath | None = Field(
        default=None, description="folder in Hugging Face format, or a GGUF file"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)] = (
        Field(
            default="auto",
            description="of weights and KV cache; auto = the checkpoint's; float16 is "
            "computed in bfloat16",
        )
    )
    model_impl: Annotated[
        Literal["auto", "surestep", "transformers"], BeforeValidator(_implementation)
    ] = Field(
        default="auto",
        description="code that computes the model; auto = our own where there is any, else "
        "transformers'",
    )
    allow_batch_variance: bool = Field(
        default=False,
        description="serve a model of transformers whose answers depend on what is computed beside "
        "them",
    )
    quantization: Annotated[str | None, BeforeValidator(_lower)] = Field(
        default=None,
        description="round linear weights while loading: int8, int4 (on CPUs) or fp8; or the form "
        "that the checkpoint must have, e.g. awq",
    )
    generation_config: str = Field(
        default="auto",
        min_length=1,
        description="source of requests' defaults: auto = the model's generation_config.json, vllm "
        "= neutral values, or another folder",
    )
    override_generation_config: dict[str, Any] | None = Field(
        default=None,
        description='JSON, e.g. {"temperature":0.6,"max_new_tokens":512}; beats that file',
    )
    hf_overrides: dict[str, Any] | None = Field(
        default=None,
        description='JSON, what config.json should say instead, e.g. {"rope_scaling":{"rope_type":'
        '"yarn","factor":4.0,"original_max_position_embeddings":32768}}; of embeddings: '
        "is_matryoshka, matryoshka_dimensions",
    )
    max_model_len: Annotated[Count | None, BeforeValidator(_own_length)] = Field(
        default=None,
        ge=2,
        description="tokens: prompt + output of one request, e.g. 32k; auto = the model's own",
    )
    speculative_config: Annotated[dict[str, Any] | None, BeforeValidator(_speculation)] = Field(
        default=None,
        description='JSON, e.g. {"method":"ngram","num_speculative_tokens":4}; none = off; auto = '
        "the checkpoint's MTP head, or a head for this model that is here, or ngram",
    )
    drafters: Path | None = Field(
        default=None,
        description="folder of draft heads from which auto takes one that names this model; "
        "default: the hub's cache",
    )
    require_drafter: bool = Field(
        default=False,
        description="do not start with an unusable draft model; otherwise nothing is drafted",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8", "int8_per_token_head"] = Field(
        default="auto",
        description="of keys and values; auto = the model's, fp8 = fp8_e4m3, int8 = "
        "int8_per_token_head (on CPUs)",
    )
    enable_lora: bool = Field(
        default=False, description="requests may have adapters of low rank, as peft writes them"
    )
    max_loras: int = Field(
        default=8, ge=1, le=4096, description="adapters that are loaded at once, at most"
    )
    max_lora_rank: int = Field(
        default=16, ge=1, le=512, description="the greatest rank of an adapter"
    )
    block_size: int = Field(default=16, ge=1, le=256, description="tokens per KV block")
    kv_cache_memory: float = Field(
        default=2.0,
        gt=0,
        description="GiB for KV blocks on each rank; default on GPUs: what is left of "
        "--gpu-memory-utilization",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="part of a GPU's memory for this engine, unless --kv-cache-memory is set; "
        "nothing on CPUs",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None,
        ge=2,
        description="KV blocks of each rank, in place of what is measured",
    )
    snapshot_memory: float = Field(
        default=1.0,
        ge=0,
        description="GiB on each rank for recurrent-state snapshots of hybrids; default on GPUs: a "
        "fifth of the caches' room",
    )

    @field_validator("override_generation_config")
    @classmethod
    def _overrides_are_known(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        check_override(given or {})
        return given

    @property
    def generation_folder(self) -> Path | None:
        """Return the folder whose generation config replaces the model's, if one is given."""
        source = self.generation_config
        return None if source in (AUTO, NEUTRAL) else Path(source)

    @property
    def replacements(self) -> Replacements:
        """Return the values that replace those of the model's folder."""
        given = self.hf_overrides or {}
        left_out = set(OVERRIDES_OF_GATEWAY)
        if "classifier_from_token" in given:  # vLLM's class for it, which has no output head
            left_out.add("architectures")
        config = {key: value for key, value in given.items() if key not in left_out}
        return Replacements(self.generation_folder, config)


class WorkerSettings(ModelSettings):
    """Settings of a tensor-parallel rank. All ranks of a group have the same, except `rank`."""

    model_config = SettingsConfigDict(cli_prog_name="surestep-worker")

    device: Annotated[Literal["cpu", "cuda"], BeforeValidator(_device)] = Field(
        default="auto",
        validate_default=True,
        description="where the model runs; auto = cuda where there is an NVIDIA GPU, else cpu",
    )
    allow_slow: bool = Field(
        default=False,
        description="serve without C kernels on CPUs, about 50 times slower",
    )
    attention_backend: Annotated[
        Literal["auto", "flash_attn", "torch_varlen", "triton", "torch"],
        BeforeValidator(_attention),
    ] = Field(
        default="auto",
        description="attention; auto = the first that serves the model and computes a token alike "
        "in any batch",
    )
    linear_backend: Literal["auto", "triton", "triton_sequential", "torch"] = Field(
        default="auto",
        description="products with unquantised weights on cuda; auto = the fastest that computes a "
        "token alike in any batch, which torch (cuBLAS) does not",
    )
    activation_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="of inputs of FP8 weights; auto = the model's; fp8 changes answers and is "
        "faster on some GPUs",
    )
    enforce_eager: bool = Field(
        default=False, description="launch the kernels of every step one by one: no CUDA graphs"
    )
    programmatic_dependent_launch: bool = Field(
        default=False,
        description="start each kernel while the one before it ends; changes no answer; for GPUs "
        "from Hopper on",
    )
    max_num_seqs: int = Field(
        default=128, ge=1, le=4096, description="most requests that run at once"
    )
    max_num_batched_tokens: Count = Field(
        default=2048,
        ge=2,
        description="most input tokens of a step, drafts included; default on CPUs: 512, or four "
        "for each of --max-num-seqs",
    )
    enable_expert_parallel: bool = Field(
        default=False, description="ranks share out whole experts, not the columns of each"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="ranks that share one model"
    )
    heartbeat_timeout_s: float = Field(
        default=3.0, gt=0, description="seconds in which an idle rank must give a sign of life"
    )
    load_timeout_s: float = Field(
        default=300.0, gt=0, description="seconds that loading and warming up may make no progress"
    )
    standby: bool = Field(
        default=True, description="keep a process beside each rank that can replace it at once"
    )
    cpu_threads: int = Field(
        default=0,
        ge=0,
        description="compute threads of a rank; 0 = its share of the cores, fewer for small steps",
    )
    load_on_demand: bool = Field(default=False, description="load the model at its first request")
    rank: int = Field(default=0, ge=0, description="index of this rank")
    local_ranks: int | None = Field(
        default=None,
        ge=1,
        description="ranks on this machine; default: all where --tp-master is on loopback, "
        "else one",
    )
    models_here: int = Field(
        default=1,
        ge=1,
        description="models that share cores, free memory and GPUs",
    )
    worker_listen: str = Field(
        default="127.0.0.1:50061",
        pattern=addresses.PATTERN,
        description="host:port of rank 0's service, rank r takes port + r; or unix:/path, and -r",
    )
    supervisor_listen: str = Field(
        default="127.0.0.1:50071",
        pattern=addresses.PATTERN,
        description="host:port of rank 0's supervisor, rank r takes port + r; or unix:/path, "
        "and -r",
    )
    tp_master: str = Field(
        default="127.0.0.1:50081", pattern=HOST_PORT, description="host:port where the ranks meet"
    )

    @property
    def max_step_tokens(self) -> int:
        """Most input tokens of one step."""
        if self.device != "cpu" or "max_num_batched_tokens" in self.model_fields_set:
            return self.max_num_batched_tokens
        return max(_CPU_STEP_TOKENS, _CPU_STEP_TOKENS_PER_SEQ * self.max_num_seqs)

    @property
    def rank_address(self) -> str:
        """Address of this rank's Worker service."""
        return addresses.nth(self.worker_listen, self.rank)

    @property
    def supervisor_address(self) -> str:
        """Address of this rank's Supervisor service."""
        return addresses.nth(self.supervisor_listen, self.rank)

    @property
    def ranks_here(self) -> int:
        """Ranks of the group that share this machine, as far as the settings tell."""
        if self.local_ranks is not None:
            return self.local_ranks
        return self.tensor_parallel_size if is_local(self.tp_master) else 1
