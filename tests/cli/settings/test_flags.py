"""The forms that flags and keys may have, and what is said of those that cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from pydantic_settings import SettingsError
from surestep_cli.main import Serve
from surestep_cli.settings.flags import FlagReader


def ask(*arguments: str) -> FlagReader:
    asked = FlagReader(Serve.model_fields)
    asked.read_arguments(arguments)
    return asked


def refusals(asked: FlagReader) -> str:
    with pytest.raises(SettingsError) as raised:
        asked.check()
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["-O3", "m"], {"model": "m"}),
        (["-qfp8", "m"], {"quantization": "fp8", "model": "m"}),
        (["m", "--max-model-len", "-1"], {"model": "m", "max_model_len": "-1"}),
        (["--model", "m"], {"model": "m"}),
        (["--disable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no-disable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--enable-prefix-caching=False"], {"enable_prefix_caching": False}),
        (["--standby", "false", "m"], {"standby": False, "model": "m"}),
        (["--enforce-eager", "m"], {"enforce_eager": True, "model": "m"}),
        (["--tensor-parallel", "2", "--gpu_mem=0.5"], {"tensor_parallel_size": "2"}),
        (["-O.mode", "3", "m", "-O", "2", "-O=1"], {"model": "m"}),
        (["m", "--api-key", "a", "b", "--port", "1"], {"api_key": ["a", "b"]}),
        (["--api-key", "a,b", "--api-key", "c"], {"api_key": ["a", "b", "c"]}),
        (["--allowed-origins", '["x", "y"]', "m"], {"allowed_origins": ["x", "y"], "model": "m"}),
        (["--hf-token", "--port", "1"], {"port": "1", "hf_token": None}),
        (["--hf-token", "x", "m"], {"hf_token": "x", "model": "m"}),
        (["--kv-cache-memory-bytes", "1536M"], {"kv_cache_memory": 1.5}),
        (["--no-async-scheduling"], {"pipeline_depth": False}),
        (
            ["-sc.method", "ngram", "--spec-tokens", "4", "-sc", '{"prompt_lookup_max": 3}'],
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_max": 3,
                }
            },
        ),
        (
            ["--speculative-config", "method=ngram,num_speculative_tokens=4"],
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        ),
        (
            [
                *("--default_chat_template_kwargs.a.b_c", "x", "--default-chat-template-kwargs.d+"),
                *("1,2", "--default-chat-template-kwargs.a.e=4k"),
            ],
            {"default_chat_template_kwargs": {"a": {"b_c": "x", "e": 4000}, "d": ["1", "2"]}},
        ),
    ],
)
def test_forms(arguments: list[str], values: dict[str, Any]) -> None:
    asked = ask(*arguments)
    asked.check()
    assert {name: asked.values.get(name) for name in values} == values


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-modl-len", "3"], "unknown flag '--max-modl-len': did you mean --max-model-len?"),
        (["--max-num", "3"], "unknown flag '--max-num': did you mean --"),
        (["--load-format", "dummy"], "--load-format is not supported yet"),
        (["--no-port"], "unknown flag '--no-port': did you mean --port?"),
        (["--port.x", "3"], "unknown flag '--port.x'"),
        (["-zz", "3"], "unknown flag '-zz'"),
        (["-m", "x.gguf"], "unknown flag '-m': the model stands without a flag"),
        (["m", "-c", "4096"], "unknown flag '-c': give --max-model-len"),
        (["--port"], "--port needs a value"),
        (["--port", "--host"], "--port needs a value"),
        (["--enforce-eager=maybe"], "--enforce-eager: takes true or false"),
        (["-sc", "[1]"], "--speculative-config: takes a JSON object, got '[1]'"),
        (["--speculative-config", "{"], "--speculative-config: takes a JSON object"),
        (["--kv-cache-memory-bytes", "1.5"], "--kv-cache-memory-bytes: "),
    ],
)
def test_what_cannot_be_had_is_told(arguments: list[str], told: str) -> None:
    assert told in refusals(ask(*arguments))


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Serve.load(["m", "--middleware", "a.b", "--enable-lora-bias", "--nonsense"])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["--middleware", "--enable-lora-bias", "unknown"]
    assert all(line.startswith("surestep serve: ") for line in lines)


def test_values_of_an_unknown_flag_are_no_models() -> None:
    told = refusals(ask("m", "--num-gpus", "4", "--ring", "1", "2", "--port", "1"))
    assert [line.split()[2] for line in told.splitlines()] == ["'--num-gpus':", "'--ring'"]


def test_values_that_change_nothing_are_told() -> None:
    asked = ask("--load-format", "fastsafetensors", "--tokenizer-mode=slow")
    asked.check()
    assert list(asked.without_effect) == ["--load-format", "--tokenizer-mode"]


def test_a_list_does_not_swallow_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Serve.load(["--served-model-name", "name", "model"])
    assert "give the model first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (["--max-model-len", "auto"], {"max_model_len": None}),
        (["--max-model-len", "-1"], {"max_model_len": None}),
        (["--max-num-batched-tokens", "8k"], {"max_num_batched_tokens": 8000}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--dtype", "float"], {"dtype": "float32"}),
        (["--attention-backend", "TRITON_ATTN"], {"attention_backend": "triton"}),
        (["--attention-backend", "FLASH_ATTN"], {"attention_backend": "flash_attn"}),
        (["--async-scheduling"], {"pipeline_depth": 1}),
        (["--no-async-scheduling"], {"pipeline_depth": 0}),
        (["--shutdown-timeout", "5"], {"drain_timeout_s": 5.0}),
        (["--max-num-queued-tokens", "1M"], {"max_queue_tokens": 1 << 20}),
        (["--log-level", "debug"], {"log_level": "DEBUG"}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--limit-mm-per-prompt", "image=0"], {}),
        (["--compilation-config", "3"], {}),
        (["--structured-outputs-config.backend", "xgrammar"], {}),
    ],
)
def test_values_of_vllm(flags: list[str], values: dict[str, Any]) -> None:
    settings = Serve.load(["m", *flags])
    assert {name: getattr(settings, name) for name in values} == values


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: m\ntensor-parallel-size: 2\nserved-model-name: [a, b]\nenable_prefix_caching: false\n"
        "swap-space: 4\nspec-method: ngram\nmax-model-len: 2k\npipeline-parallel-size: 1\n"
        "no-enforce-eager: true\ndownload-dir:\nlora-modules: []\n"
    )
    return path


def test_keys_of_the_file_are_flags(config: Path) -> None:
    settings = Serve.load(["--config", str(config), "--trust-remote-code", "-tp", "1"])
    assert (settings.model, settings.tensor_parallel_size) == ("m", 1)
    assert settings.served_model_name == ("a", "b")
    assert (settings.enable_prefix_caching, settings.enforce_eager) == (False, False)
    assert settings.speculative_config == {"method": "ngram"}
    assert settings.max_model_len == 2000
    assert list(settings.without_effect) == ["--trust-remote-code", "--swap-space"]


def test_a_file_that_asks_too_much(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("pipeline-parallel-size: 2\nmax_modl_len: 3\n")
    with pytest.raises(SystemExit):
        Serve.load(["--config", str(config)])
    told = capsys.readouterr().err
    assert "--pipeline-parallel-size is not supported yet" in told
    assert "unknown setting 'max_modl_len': did you mean max-model-len?" in told


def test_variables_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is not left open because its key came in vLLM's variable."""
    monkeypatch.setenv("VLLM_API_KEY", "key")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "64")
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "30")
    settings = Serve.load(["m"])
    assert settings.api_key == (SecretStr("key"),)
    assert settings.log_level == "DEBUG"
    assert (settings.kv_cache_memory, settings.max_n) == (40.0, 64)
    assert settings.timeout_keep_alive == 30
    assert list(settings.without_effect) == ["VLLM_USE_V1"]
    monkeypatch.setenv("SURESTEP_API_KEY", "another")
    assert Serve.load(["m"]).api_key == (SecretStr("another"),)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")  # which is vLLM's word for its default
    assert "kv_cache_memory" not in Serve.load(["m"]).model_fields_set
