"""`surestep serve` knows every setting of every service, and hands them on."""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from surestep_cli.main import Serve
from surestep_cli.serve.model_source import ModelFolder
from surestep_cli.serve.wiring import socket_folder, wiring
from surestep_gateway.settings.config import GatewaySettings
from surestep_scheduler.config import SchedulerSettings
from surestep_worker.config import WorkerSettings

SERVICES = (GatewaySettings, SchedulerSettings, WorkerSettings)
MODEL = ModelFolder("tiny", Path("/models/tiny"))
# Same name and meaning, another default: the scheduler takes what the workers say, services get a
# folder where users give a name, the gateway waits longer because it drains first.
_OWN_DEFAULTS = {"max_num_seqs", "model", "drain_timeout_s"}


def test_services_agree_on_the_settings_they_share() -> None:
    defaults: dict[str, set[Any]] = defaultdict(set)
    for service in SERVICES:
        for name, field in service.model_fields.items():
            if name not in _OWN_DEFAULTS:
                defaults[name].add(repr(field.default))
    assert {name: values for name, values in defaults.items() if len(values) > 1} == {}


def test_serve_knows_every_setting() -> None:
    assert set(Serve.model_fields) >= {name for cls in SERVICES for name in cls.model_fields}


def test_flags_of_vllm() -> None:
    settings = Serve.load(
        [
            *("model", "--host", "0.0.0.0", "--port", "1", "--served-model-name", "m"),
            *("--dtype", "bfloat16", "--device", "cpu", "--max-model-len", "64"),
            *("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--api-key", "k"),
            *("--tensor-parallel-size", "2", "--no-enable-prefix-caching"),
            *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
            *("--pipeline-depth", "2"),
        ]
    )
    assert settings.model == "model"
    assert settings.served_model_name == ("m",)
    assert settings.enable_prefix_caching is False
    assert settings.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert settings.pipeline_depth == 2


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*flags: str) -> tuple[GatewaySettings, SchedulerSettings, WorkerSettings]:
        for name, value in wiring(Serve.load(flags), MODEL).items():
            monkeypatch.setenv(name, value)
        return GatewaySettings.load([]), SchedulerSettings.load([]), WorkerSettings.load([])

    return start


def test_services_find_each_other_by_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that nobody else may enter, and that goes with the launcher."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("surestep_common.addresses.LONGEST_PATH", 1000)  # no server listens here
    settings = Serve.load(["--tensor-parallel-size", "2"])
    with socket_folder(settings) as folder:
        assert folder is not None
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name, value in wiring(settings, MODEL, sockets=folder).items():
            monkeypatch.setenv(name, value)
        (folder / "worker").touch()
    assert not folder.exists()
    gateway, scheduler = GatewaySettings.load([]), SchedulerSettings.load([])
    assert gateway.scheduler_url == (scheduler.scheduler_listen,) == (f"unix:{folder}/scheduler",)
    monkeypatch.setenv("SURESTEP_RANK", "1")
    worker = WorkerSettings.load([])
    assert worker.rank_address == f"unix:{folder / 'worker'}-1"
    assert scheduler.supervisor_addresses == [
        f"unix:{folder}/supervisor",
        worker.supervisor_address,
    ]


def test_ports_are_taken_where_sockets_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths that are too long for a socket, places that cannot be written, and TLS."""
    for place in (tmp_path / ("x" * 100), tmp_path / "missing"):
        for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
            monkeypatch.setenv(variable, str(place))
        monkeypatch.setattr("tempfile.tempdir", str(place))
        with socket_folder(Serve.load([])) as folder:
            assert folder is None
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    tls = ["--grpc-tls-cert", str(tmp_path / "cert"), "--grpc-tls-key", str(tmp_path / "key")]
    with socket_folder(Serve.load(tls)) as folder:
        assert folder is None


def test_services_find_each_other(children: Any) -> None:
    gateway, scheduler, worker = children("--tensor-parallel-size", "2", "--port", "0")
    assert gateway.scheduler_url == (scheduler.scheduler_listen,)
    host, port = worker.supervisor_listen.split(":")
    assert scheduler.supervisor_addresses == [f"{host}:{port}", f"{host}:{int(port) + 1}"]
    assert gateway.port != 0
    assert gateway.model == worker.model == MODEL.path
    assert gateway.served_model_name == ("tiny",)


def test_what_the_user_says_reaches_the_services(children: Any) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    gateway, scheduler, worker = children(
        *("--scheduler-listen", "127.0.0.1:1234", "--served-model-name", "a,b"),
        *("--max-num-seqs", "5", "--speculative-config", json.dumps(speculation)),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
        "--enable-auto-tool-choice",
    )
    assert scheduler.scheduler_listen == "127.0.0.1:1234"
    assert gateway.scheduler_url == ("127.0.0.1:1234",)
    assert scheduler.max_num_seqs == worker.max_num_seqs == 5
    assert worker.speculative_config == speculation
    assert gateway.served_model_name == ("a", "b")
    assert (gateway.reasoning_parser, gateway.tool_call_parser) == ("qwen3", "hermes")
    assert gateway.enable_auto_tool_choice


def test_all_mistakes_of_the_file_are_told_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "max_num_seq: 3\nport: 0.5\nenable_lora_bias: true\nmax-model-len: 1\nhost: a\n"
    )
    with pytest.raises(SystemExit) as ended:
        Serve.load(["--config", str(path), "--max-num-seqs", "0"])
    assert ended.value.code == 2
    *of_file, of_flag = sorted(capsys.readouterr().err.splitlines())
    start = f"surestep serve: config file {path}: "
    why = "adapters are served as peft writes them, in the type of the model"
    assert [line.removeprefix(start).partition(", got")[0] for line in of_file] == [
        f"--enable-lora-bias is not supported yet: {why}",
        "max_model_len: Input should be greater than or equal to 2",
        "port: Input should be a valid integer",
        "unknown setting 'max_num_seq': did you mean max-num-seqs?",
    ]
    assert of_flag.endswith("(--max-num-seqs or SURESTEP_MAX_NUM_SEQS)")


def test_a_mistake_that_a_flag_replaces_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_num_seqs: 0\n")
    assert Serve.load(["--config", str(path), "--max-num-seqs", "3"]).max_num_seqs == 3


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", "float16"), ("BF16", "bfloat16"), ("float", "float32")]
)
def test_dtypes_have_short_names(name: str, dtype: str) -> None:
    assert Serve.load(["--dtype", name]).dtype == dtype


def test_a_scheduler_url_of_the_users_wins(children: Any) -> None:
    gateway, scheduler, _ = children("--scheduler-url", "a:1", "--scheduler-url", "grpc://b:2")
    assert gateway.scheduler_url == ("a:1", "b:2")
    assert scheduler.scheduler_listen not in gateway.scheduler_url


def test_everything_listens_on_the_loopback_interface(children: Any) -> None:
    """Unless told otherwise: by default, and where the launcher wires the services."""
    assert (
        GatewaySettings.model_fields["host"].get_default(call_default_factory=True) == "127.0.0.1"
    )
    for cls in SERVICES:
        for name, field in cls.model_fields.items():
            if name.endswith("_listen"):
                assert str(field.default).startswith("127.0.0.1:"), name
    gateway, scheduler, worker = children()
    assert gateway.host == "127.0.0.1"
    for address in (scheduler.scheduler_listen, worker.supervisor_listen, worker.worker_listen):
        assert address.startswith("127.0.0.1:")
