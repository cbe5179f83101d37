"""An architecture of transformers, tiny and random, served by transformers' code over our ops."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import surestep_worker.models.transformers  # noqa: F401  # before torch computes anything
import torch
import transformers
from support.checkpoints.any_architecture import ORIGINAL, ROPE, fields_of, tiny_config
from support.parity.stepping import Row, in_one_group, step
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, attention_case, load_model
from surestep_worker.models.transformers.config import CAUSAL
from torch import Tensor

SHAPES: Mapping[str, Mapping[str, Any]] = {  # an architecture has what it takes of each
    "as it is": {},
    "one KV head of 80 elements, tied, linear": {
        "num_key_value_heads": 1,
        "head_dim": 80,
        "tie_word_embeddings": True,
        ROPE: {"rope_type": "linear", "factor": 2.0},
    },
    "heads of 96 elements, untied, yarn": {
        "head_dim": 96,
        "tie_word_embeddings": False,
        ROPE: {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 32},
    },
    "heads of 256 elements, llama3": {
        "head_dim": 256,
        ROPE: {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 32,
        },
    },
    "dynamic": {ROPE: {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {ROPE: {"rope_type": "longrope", "factor": 2.0, ORIGINAL: 32}},
}
_LENGTH, _BLOCKS, _BLOCK = 40, (3, 5, 7), 16
_CUTS = (5, 6, 20)
_FAR = 1e-4
_MEMORY, _SECONDS = 6 << 30, 60  # of a trial
_TOO_MUCH = f"not tried: it takes more than {_SECONDS} s or 6 GiB"


class Verdict(NamedTuple):
    """What came of an architecture."""

    served: bool
    why: str = ""  # it is not


def architectures() -> list[str]:
    """Return all causal ones by name."""
    return sorted(CAUSAL)


def try_apart(architecture: str) -> Verdict:
    """Try an architecture in a process of its own, since some take all memory or all day."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
            signal.alarm(_SECONDS)
            os.write(writer, json.dumps(_try(architecture)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    if not told:
        return Verdict(served=False, why=_TOO_MUCH)
    return Verdict(*json.loads(told))


def _try(architecture: str) -> Verdict:
    """Serve each shape that the architecture can have."""
    for name, fields in SHAPES.items():
        fault = _fault(architecture, fields)
        if fault:
            return Verdict(served=False, why=f"{name}: {fault}" if fields else fault)
    return Verdict(served=True)


def _fault(architecture: str, shape: Mapping[str, Any]) -> str:
    """Return why a shape is not served; empty: it is, or the architecture has no such shape."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            fields = fields_of(architecture, shape)
            if shape and not fields:
                return ""
            theirs = saved(architecture, Path(folder), **fields)
        except Exception as error:  # noqa: BLE001  # whatever a class raises
            if not shape:
                return _unmade(architecture, error)
            rest = {name: value for name, value in shape.items() if name != ROPE}
            return _fault(architecture, rest) if rest and rest != shape else ""
        try:
            return compare(Path(folder), theirs)
        except InvalidRequest as error:
            return _line(error)
        except Exception as error:  # noqa: BLE001  # a fault of ours, which the table shows
            return f"{type(error).__name__}: {_line(error)}"


def _unmade(architecture: str, error: Exception) -> str:
    """Return why there is no tiny model."""
    if getattr(transformers, architecture)._is_stateful:
        return "keeps a state: not served"
    line = _line(error)
    return line if line == _TOO_MUCH else f'not tried, in the words of transformers: "{line}"'


def saved(architecture: str, folder: Path, **fields: Any) -> Any:
    """Write a random checkpoint; return it as transformers reads it."""
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(tiny_config(architecture, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model(torch.zeros(1, 3, dtype=torch.long), use_cache=False)  # can it compute at all?
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def compare(folder: Path, theirs: Any) -> str:
    """Return how a checkpoint is served otherwise than by transformers; empty: it is not."""
    source = ModelSource(folder, implementation="transformers")
    kernels = load_kernels("cpu", case=attention_case(source, "cpu", "float32", _BLOCK))
    ours = load_model(
        source,
        dtype="float32",
        device="cpu",
        tp=TensorParallel(),
        kernels=kernels,
    )
    ours.rehearse()
    ids = torch.randint(3, ours.config.vocab_size, (_LENGTH,)).tolist()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids]), use_cache=False).logits[0].float()
        whole = torch.cat(list(steps_of(ours, kernels, ids, (_LENGTH,))))
        cut = torch.cat(list(steps_of(ours, kernels, ids, (*_CUTS, _LENGTH))))
    far = float((whole - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
    if not far <= _FAR:
        return f"logits are off by {far:.1e}"
    return "" if torch.equal(whole, cut) else "logits depend on how a prompt is cut"


def steps_of(
    model: Model, kernels: KernelSet, ids: list[int], ends: tuple[int, ...]
) -> Iterator[Tensor]:
    """Yield the logits of a sequence that is cut at these places."""
    cache, begin = KVCache(in_one_group(model.kv_spec(_BLOCK)), 12, kernels, "cpu"), 0
    for end in ends:
        yield from step(model, cache, [Row(ids[begin:end], begin, _BLOCKS)])
        begin = end


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _TOO_MUCH if "allocate memory" in text else text[:160]


def quiet() -> None:
    """Have transformers say nothing."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
