"""Settings of a worker: the supervisor of one rank and the rank itself read the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from surestep_common.access import PeerSettings, is_loopback

HOST_PORT = r"^[^\s:]+:\d{1,5}$"


class WorkerSettings(PeerSettings):
    """One tensor-parallel rank. Every rank of a group is given the same values but `rank`."""

    model_config = SettingsConfigDict(cli_prog_name="surestep-worker")

    model: Path | None = Field(default=None, description="folder in Hugging Face format")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the model runs")
    attention_backend: Literal["auto", "flash_attn", "torch_varlen", "triton", "torch"] = Field(
        default="auto",
        description="what attends to the KV cache; auto = the first that serves the model and "
        "computes a token alike in any batch",
    )
    linear_backend: Literal["auto", "triton", "torch"] = Field(
        default="auto",
        description="what multiplies by weights that are not quantised, on cuda; auto = triton, "
        "which computes a token alike in any batch; torch = cuBLAS, which does not",
    )
    enforce_eager: bool = Field(
        default=False, description="launch the kernels of every step one by one: no CUDA graphs"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of weights and KV cache; auto = the checkpoint's"
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = Field(
        default="auto",
        description="of keys and values; auto = the model's, fp8 = fp8_e4m3, a byte an element",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="tokens: prompt + output of one request; none = the model's own",
    )
    max_num_seqs: int = Field(
        default=128, ge=1, le=4096, description="most requests that run at once"
    )
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="most input tokens of one step, drafts included"
    )
    block_size: int = Field(default=16, ge=1, le=256, description="tokens per KV block")
    kv_cache_memory: float = Field(default=2.0, gt=0, description="GiB for KV blocks on each rank")
    snapshot_memory: float = Field(
        default=1.0,
        ge=0,
        description="GiB on each rank for recurrent-state snapshots, the prefix cache of hybrids",
    )
    enable_expert_parallel: bool = Field(
        default=False, description="ranks share out whole experts, not the columns of each"
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="ranks that share one model"
    )
    speculative_config: dict[str, Any] | None = Field(
        default=None,
        description='JSON, e.g. {"method":"ngram","num_speculative_tokens":4}; none = off',
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
        default=0, ge=0, description="compute threads of a rank; 0 = its share of the cores"
    )
    rank: int = Field(default=0, ge=0, description="index of this rank")
    worker_listen: str = Field(
        default="127.0.0.1:50061",
        pattern=HOST_PORT,
        description="host:port of rank 0's service; rank r takes port + r",
    )
    supervisor_listen: str = Field(
        default="127.0.0.1:50071",
        pattern=HOST_PORT,
        description="host:port of rank 0's supervisor; rank r takes port + r",
    )
    tp_master: str = Field(
        default="127.0.0.1:50081", pattern=HOST_PORT, description="host:port where the ranks meet"
    )

    @property
    def rank_address(self) -> str:
        """host:port of this rank's Worker service."""
        return _shifted(self.worker_listen, self.rank)

    @property
    def supervisor_address(self) -> str:
        """host:port of this rank's Supervisor service."""
        return _shifted(self.supervisor_listen, self.rank)

    @property
    def ranks_here(self) -> int:
        """Ranks of the group that share this machine, as far as the settings tell."""
        host, _, _ = self.tp_master.rpartition(":")
        return self.tensor_parallel_size if is_loopback(host) else 1


def _shifted(address: str, ranks: int) -> str:
    host, port = address.rsplit(":", 1)
    return f"{host}:{int(port) + ranks}"
