"""A model folder in Hugging Face format: its JSON files, its weight files, its fingerprint.

It is read without torch, since a supervisor reads folders, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_common.gguf import weights_of
from surestep_common.model_files import object_or_empty, read_object

from .gguf_entries import read_entries as gguf_entries
from .safetensors_header import Entry, read_header, shown

logger = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
_ID = re.compile(r"[0-9]{1,9}")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = "pytorch_model.bin"  # is not read: a pickle may run any code
_CONVERT = (
    """python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() """
    """for k, v in torch.load('pytorch_model.bin', weights_only=True).items()}, """
    """'model.safetensors')\""""
)  # in its folder
_SAMPLES = 1 << 14  # of a checkpoint in all; every tensor has at least one
_MOST_SAMPLES = 16  # of a tensor
_SAMPLE_BYTES = 64
_NAMES_SHOWN = 6
_HEADS = "lm_head.weight", "language_model.lm_head.weight"  # of models that read images, too
_EMBEDDING, _TIED = "embed_tokens.weight", "tie_word_embeddings"
_TEXT = "text_config"
_QUANTIZATION, _MODELOPT = "quantization_config", "hf_quant_config.json"
_SCALINGS = "rope_parameters", "rope_scaling"  # since transformers 5, and before
_ROTARY = frozenset({*_SCALINGS, "rope_theta"})
_KEPT_OF_ROTARY = "rope_theta", "partial_rotary_factor"  # when another scaling comes
_COMPARED_BYTES = 1 << 20  # at once
# Keys that say where a checkpoint was made, not what it computes.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version", "_from_model_config"})


class Replacements(NamedTuple):
    """Values that replace those of a model folder."""

    generation_folder: Path | None = None  # of another generation_config.json
    config: Mapping[str, Any] = {}  # values for config.json


AS_IT_IS = Replacements()


class ConfigFiles(NamedTuple):
    """The parsed JSON files of a model folder."""

    config: Mapping[str, Any]  # config.json
    generation: Mapping[str, Any]  # generation_config.json; empty without one
    tokenizer_end: int | None = None  # id of the tokenizer's eos_token, if neither file names it

    @classmethod
    def read(cls, folder: Path, replaced: Replacements = AS_IT_IS) -> ConfigFiles:
        """Read the files, and put in what replaces parts of them.

        Raises InvalidRequest if config.json is missing, or the other one where it was named, if
        either is not a JSON object, or if the model has no such value as is to be replaced.
        """
        generation = (replaced.generation_folder or folder) / GENERATION_CONFIG
        wanted = replaced.generation_folder is not None or generation.exists()
        config = with_quantization(read_object(folder / "config.json"), folder)
        config = overridden(config, replaced.config)
        files = cls(config, read_object(generation) if wanted else {})
        end = _tokenizer_end(folder)
        return files if end in files._named_ends() else files._replace(tokenizer_end=end)

    def _named_ends(self) -> list[Any]:
        text = self.config.get(_TEXT)
        places = (self.config, self.generation, text if isinstance(text, dict) else {})
        named = [place.get("eos_token_id") for place in places]
        return [id_ for one in named for id_ in (one if isinstance(one, list) else [one])]

    def with_head_of(self, entries: Mapping[str, Entry]) -> ConfigFiles:
        """Return files that tie no output head which the checkpoint holds: what it holds counts,
        as in transformers, unless that is a copy of the embedding.

        Raises InvalidRequest if the weights cannot be read.
        """
        head = next((entries[name] for name in _HEADS if name in entries), None)
        if head is None or self.config.get(_TIED) is False:  # some tie where none says so
            return self
        embeddings = (entry for name, entry in entries.items() if name.endswith(_EMBEDDING))
        if any(_same_bytes(head, embedding) for embedding in embeddings):
            return self
        if self.config.get(_TIED):
            logger.warning(
                "tie_word_embeddings is true, but the file has another lm_head.weight, which counts"
            )
        return self._replace(config={**self.config, _TIED: False})


def with_quantization(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json with what a file of ModelOpt's says of the weights, if it does not
    itself."""
    about = object_or_empty(folder / _MODELOPT).get("quantization")
    if config.get(_QUANTIZATION) or not isinstance(about, dict):
        return dict(config)
    return {**config, _QUANTIZATION: {"quant_method": "modelopt", **about}}


def overridden(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values, as vLLM's --hf-overrides: objects one key at a time.

    Raises InvalidRequest for a key that the file does not have, of which nothing would come; what
    describes rotary embeddings may be new.
    """
    merged = dict(config)
    for key, value in values.items():
        text = merged.get(_TEXT)
        if key not in merged and isinstance(text, dict) and (key in text or key in _ROTARY):
            merged[_TEXT] = overridden(text, {key: value})
        elif key in _ROTARY:
            merged |= _rotary(merged, key, value)
        elif key not in merged:
            raise InvalidRequest(
                f"hf_overrides: config.json of this model has no '{key}'", param="hf_overrides"
            )
        elif isinstance(value, dict) and isinstance(merged[key], dict):
            merged[key] = overridden(merged[key], value)
        else:
            merged[key] = value
    return merged


def _rotary(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return what describes rotary embeddings when `key` is `value`: in one object, as of
    transformers 5, whichever of its two names the file and the operator use."""
    known = config.get(_SCALINGS[0]) or config.get(_SCALINGS[1]) or {}
    if key not in _SCALINGS:
        return {key: value} | ({_SCALINGS[0]: known | {key: value}} if key in known else {})
    if not isinstance(value, dict | None):
        raise InvalidRequest(f"hf_overrides: {key} is no object", param="hf_overrides")
    kept = {name: known[name] for name in _KEPT_OF_ROTARY if name in known}
    return {_SCALINGS[0]: kept | (value or {}), _SCALINGS[1]: None}


def _tokenizer_end(folder: Path) -> int | None:
    """Return the id of the token at which the tokenizer ends a text; None where it names none.

    Files that cannot be read name none: the gateway says what is wrong with them.
    """
    special = object_or_empty(folder / "special_tokens_map.json")
    config = special | object_or_empty(folder / _TOKENIZER_CONFIG)
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    listed = config.get("added_tokens_decoder")
    if not isinstance(text, str):
        return None
    for id_, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == text and _ID.fullmatch(id_):
            return int(id_)
    return _id_in(object_or_empty(folder / "tokenizer.json"), text)


def _id_in(tokenizer: Mapping[str, Any], text: str) -> int | None:
    """Return the id of an added token of a tokenizer.json."""
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text:
            id_ = token.get("id")
            return id_ if type(id_) is int and id_ >= 0 else None
    return None


def read_entries(folder: Path) -> dict[str, Entry]:
    """Return every tensor of the checkpoint. Raises InvalidRequest for broken files or headers, and
    for a tensor in two files."""
    if (file := weights_of(folder)) is not None:
        return gguf_entries(file)
    entries: dict[str, Entry] = {}
    repeated: list[str] = []
    for path in _weight_files(folder):
        header = read_header(path)
        repeated += entries.keys() & header.keys()
        entries |= header
    if repeated:
        raise InvalidRequest(f"in more than one file: {some(repeated)}", param="model")
    return entries


def quant_method(config: object) -> str | None:
    """Return what a config.json says that the weights are quantised by; None: they are plain."""
    about = config.get(_QUANTIZATION) if isinstance(config, Mapping) else None
    method = about.get("quant_method", "unknown") if about and isinstance(about, Mapping) else None
    return method if isinstance(method, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a single-file checkpoint, or of one with an index."""
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        hint = f"; convert its {_PICKLED}: {_CONVERT}" if (folder / _PICKLED).exists() else ""
        raise InvalidRequest(f"no {_SINGLE} and no {_INDEX} in {folder}{hint}", param="model")
    places = read_object(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(map(_is_plain_name, names)):
        raise InvalidRequest(
            f"{index}: weight_map must map tensors to files of the same folder", param="model"
        )
    return [folder / name for name in sorted(set(names))]


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def fingerprint(files: ConfigFiles, entries: Mapping[str, Entry]) -> str:
    """Return a fingerprint of what a checkpoint computes: configuration, and name, type, shape and
    samples of the bytes of every tensor, however they are spread over files.

    It is cheap: some thousand reads of a few bytes. Training changes most weights, so a fine-tune
    of the same shape has another fingerprint; one that differs in a few elements may not. Raises
    InvalidRequest if a file cannot be read.
    """
    config = _of_model(files)
    more = [] if files.tokenizer_end is None else [files.tokenizer_end]
    digest = hashlib.sha256(_canonical([config, files.generation.get("eos_token_id"), *more]))
    samples = min(max(_SAMPLES // max(len(entries), 1), 1), _MOST_SAMPLES)
    descriptors: dict[Path, int] = {}
    try:
        for name in sorted(entries):
            entry = entries[name]
            digest.update(_canonical([name, entry.dtype, entry.shape]))
            if entry.file not in descriptors:
                descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
            for place, length in _samples(entry, samples):
                digest.update(os.pread(descriptors[entry.file], length, place))
    except OSError as error:
        raise InvalidRequest(f"cannot read weights: {error}", param="model") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return digest.hexdigest()[:32]


def computed(folder: Path, replaced: Replacements = AS_IT_IS) -> str:
    """Return what a folder's configuration says is computed, and how texts end, as text that can be
    compared. Raises InvalidRequest.
    """
    files = ConfigFiles.read(folder, replaced)
    generation = {k: v for k, v in files.generation.items() if k not in _INCIDENTAL}
    return _canonical([_of_model(files), generation, files.tokenizer_end]).decode()


def _of_model(files: ConfigFiles) -> dict[str, Any]:
    return {key: value for key, value in files.config.items() if key not in _INCIDENTAL}


def fingerprint_of(folder: Path, replaced: Replacements = AS_IT_IS) -> str:
    """Return the fingerprint of a folder as it is now. Raises InvalidRequest if it is not a
    checkpoint."""
    return fingerprint(ConfigFiles.read(folder, replaced), read_entries(folder))


def _same_bytes(one: Entry, other: Entry) -> bool:
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return False
    try:
        with one.file.open("rb") as left, other.file.open("rb") as right:
            left.seek(one.begin)
            right.seek(other.begin)
            sizes = (
                min(_COMPARED_BYTES, one.nbytes - at)
                for at in range(0, one.nbytes, _COMPARED_BYTES)
            )
            return all(left.read(size) == right.read(size) for size in sizes)
    except OSError as error:
        raise InvalidRequest(f"cannot read weights: {error}", param="model") from error


def _samples(entry: Entry, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and length of samples, spread evenly over a tensor."""
    length = min(entry.nbytes, _SAMPLE_BYTES)
    room = entry.nbytes - length
    for i in range(count):
        yield entry.begin + room * (2 * i + 1) // (2 * count), length


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def some(names: Iterable[str]) -> str:
    """List a few names in one line."""
    ordered = sorted(map(shown, names))
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
