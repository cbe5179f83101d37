"""Convert a GGUF file, once, into a folder in Hugging Face format that `load_model` reads.

Weights are written as bfloat16: block-quantised values times their scales need up to 15 bits of
mantissa, so only float32 would keep every one of them, at twice the disk, memory and load time. The
rounding (2**-9 of a value) is a tenth or less of the error the quantisation itself has made.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surestep_common.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TokenizersBackend

logger = logging.getLogger(__name__)

Announce = Callable[[str], None]


def import_gguf(
    gguf_path: Path, out_dir: Path, progress: Announce = lambda stage: logger.info("%s", stage)
) -> None:
    """Write model, tokenizer, chat template and generation config of `gguf_path` to `out_dir`.

    `progress` is called with the name of each stage as it starts; transformers draws its own bars
    inside the long one. `out_dir` appears complete or not at all. Raises InvalidRequest if the file
    is missing or not a GGUF that transformers can read, or if `out_dir` exists.
    """
    if not gguf_path.is_file():
        raise InvalidRequest(f"no GGUF file at {gguf_path}", param="gguf")
    if out_dir.exists():
        raise InvalidRequest(f"{out_dir} exists already", param="out_dir")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _convert(gguf_path, partial, progress)
        partial.chmod(0o755)
        os.rename(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf_path: Path, folder: Path, progress: Announce) -> None:
    progress("reading the GGUF header")
    metadata = _read_metadata(gguf_path)
    progress("converting the tokenizer")
    tokenizer = load_tokenizer(gguf_path)
    progress("dequantising the weights")
    model = _load_model(gguf_path)
    model.generation_config.eos_token_id = _eos_token_ids(metadata, tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    progress("writing the model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(
            0o644
        )  # safetensors makes it readable by its owner only; the services have their own user


def _read_metadata(gguf_path: Path) -> dict[str, Any]:
    """Return the tokenizer's scalar fields, without its large arrays."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except ValueError as error:
        raise InvalidRequest(f"{gguf_path} is not a GGUF file: {error}", param="gguf") from error
    scalars = {name: field for name, field in reader.fields.items() if len(field.types) == 1}
    return {name: field.contents() for name, field in scalars.items()}


def load_tokenizer(gguf_path: Path) -> TokenizersBackend:
    """Return the tokenizer as transformers makes it, but for what that gets wrong."""
    from transformers import AutoTokenizer, TokenizersBackend

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    assert isinstance(tokenizer, TokenizersBackend), "only these are built from GGUF metadata"
    if _read_metadata(gguf_path).get("tokenizer.ggml.pre") == "smollm":
        _split_like_smollm(tokenizer)
    return tokenizer


def _split_like_smollm(tokenizer: TokenizersBackend) -> None:
    """Split digits one by one before the GPT-2 split, which alone would cut `"  12"` elsewhere.

    transformers 5.23 does not know this `tokenizer.ggml.pre` and falls back to the GPT-2 split.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _load_model(gguf_path: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )


def _eos_token_ids(metadata: dict[str, Any], tokenizer: TokenizersBackend) -> list[int]:
    """Return end of sequence and, if the file names one, end of turn."""
    ids = {tokenizer.eos_token_id, metadata.get("tokenizer.ggml.eot_token_id")}
    return sorted(i for i in ids if i is not None)
