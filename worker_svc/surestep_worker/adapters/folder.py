"""A folder that peft has written: an adapter's configuration and its tensors, checked strictly.

It is read without torch. What would change the model in a way that is not served is refused by
name, and so is everything that is not known: nothing of an adapter is left out in silence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from surestep_common.errors import InvalidRequest, ModelNotFound

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import some
from surestep_worker.checkpoint.safetensors_header import Entry, read_header, shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PARAM = "lora_path"
DTYPES = ("F32", "BF16", "F16")
_MOST_CONFIG_BYTES = 1 << 20
_MOST_RANK, _MOST_ALPHA = 1 << 16, 1e6
_DIGEST_DIGITS = 32
_PREFIX = "base_model.model."
_HALF = re.compile(r"(.+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")  # peft takes keys of patterns for regular expressions
_ANY_BEFORE = ".*\\."  # which peft itself puts before an end
# What says how an adapter was trained, or which modules it was to have: the tensors tell.
_OF_TRAINING = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "peft_type",
        "peft_version",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "bias",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "loftq_config",
        "eva_config",
        "runtime_config",
        "qalora_group_size",
        "megatron_config",
        "megatron_core",
        "ensure_weight_tying",
    )
)
# Ways to begin that leave the model's own weights as they are.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


class Scaling(NamedTuple):
    """Factor of B A, which depends on the rank of each module."""

    alpha: float
    patterns: Mapping[str, float]  # alpha by the end of a module's name
    by_root: bool  # rsLoRA: divided by the root of the rank

    def of(self, module: str, rank: int) -> float:
        """Return the factor of a module whose A has so many rows."""
        ends = (key for key in self.patterns if f".{module}".endswith(f".{key}"))
        alpha = self.patterns.get(next(ends, ""), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


class Halves(NamedTuple):
    """Tensors of one module: B [N, r] times A [r, K]."""

    a: Entry
    b: Entry


class AdapterFolder(NamedTuple):
    """A checked adapter."""

    modules: Mapping[str, Halves]  # by name of the module in the model
    scaling: Scaling
    tensors: Path

    def read(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the bytes of the file of tensors. Raises InvalidRequest."""
        try:
            data = np.fromfile(self.tensors, dtype=np.uint8)
        except OSError as error:
            message = f"cannot read {self.tensors}: {error.strerror}"
            raise InvalidRequest(message, param=PARAM) from error
        if len(data) < max(half.end for halves in self.modules.values() for half in halves):
            raise InvalidRequest(f"{self.tensors} was cut off while it was read", param=PARAM)
        return data

    def digest(self, data: bytes | memoryview) -> str:
        """Return a digest of the bytes that were read and of the factors, in hexadecimal."""
        digest = sha256(repr((sorted(self.modules), self.scaling)).encode())
        digest.update(data)
        return digest.hexdigest()[:_DIGEST_DIGITS]


def read_folder(folder: Path) -> AdapterFolder:
    """Read a folder. Raises ModelNotFound for one without an adapter, InvalidRequest naming what is
    wrong, or not served."""
    if not folder.is_absolute():
        raise InvalidRequest(f"'{folder}' is no absolute path", param=PARAM)
    scaling = _scaling(_config(folder / CONFIG))
    try:
        entries = read_header(folder / TENSORS)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=PARAM) from error
    return AdapterFolder(_modules(entries), scaling, folder / TENSORS)


def _config(path: Path) -> Mapping[str, Any]:
    try:
        if path.exists() and not path.is_file():  # opening a pipe may block for ever
            raise InvalidRequest(f"{path} is not a file", param=PARAM)
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        config = json.loads(text) if len(text) <= _MOST_CONFIG_BYTES else None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        kind = ModelNotFound if missing else InvalidRequest
        raise kind(f"cannot read {path}: {error.strerror}", param=PARAM) from error
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} is no JSON object of a usual size", param=PARAM)
    return config


def _scaling(config: Mapping[str, Any]) -> Scaling:
    """Check a configuration. Raises InvalidRequest for what is not served."""
    if config.get("peft_type") != "LORA":
        _refuse("peft_type", config.get("peft_type"), "only LORA is served")
    if config.get("bias", "none") != "none":
        _refuse("bias", config["bias"], "only none is served")
    beginning = config.get("init_lora_weights", True)
    if beginning not in _BEGINNINGS:
        _refuse("init_lora_weights", beginning, "it changes the model's own weights")
    for key, value in config.items():
        if key not in _OF_TRAINING and value:
            _refuse(key, value, "it is not served")
    fields = Fields(config, CONFIG)
    fields.size("r", _MOST_RANK)
    patterns = config.get("alpha_pattern") or {}
    known = patterns if isinstance(patterns, dict) else {"": None}
    ends = {key: key.removeprefix(_ANY_BEFORE) for key in known}
    if not all(map(_LITERAL.fullmatch, ends.values())):
        _refuse("alpha_pattern", patterns, "only ends of names are served, no expressions")
    alphas = Fields(patterns, CONFIG)
    return Scaling(
        fields.number("lora_alpha", _MOST_ALPHA),
        {end: alphas.number(key, _MOST_ALPHA) for key, end in ends.items()},
        fields.flag("use_rslora", default=False),
    )


def _refuse(key: str, value: Any, why: str) -> None:
    message = f"{CONFIG} has {shown(str(key))} = {shown(str(value))}: {why}"
    raise InvalidRequest(message, param=PARAM)


def _modules(entries: Mapping[str, Entry]) -> dict[str, Halves]:
    """Pair the tensors. Raises InvalidRequest for others, and for halves that do not fit."""
    found, strange = dict[str, dict[str, Entry]](), list[str]()
    for name, entry in entries.items():
        match = _HALF.fullmatch(name.removeprefix(_PREFIX))
        if match is None or entry.dtype not in DTYPES or len(entry.shape) != 2 or not entry.nbytes:
            strange.append(name)
        else:
            found.setdefault(match[1], {})[match[2]] = entry
    strange += [
        module
        for module, halves in found.items()
        if halves.keys() != {"A", "B"} or halves["A"].shape[0] != halves["B"].shape[1]
    ]
    if strange or not found:
        what = f"tensors that are not served: {some(strange)}" if strange else "no tensor"
        raise InvalidRequest(f"{TENSORS} has {what}", param=PARAM)
    return {module: Halves(h["A"], h["B"]) for module, h in found.items()}
