"""The least GGUF file that is a model: its text side, and an embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter


def write_least(path: Path, *, more_tensors: int = 0, part: int = 0) -> Path:
    """Write a Llama of no layers, with `more_tensors` that are called tensor1, tensor2 and so on.

    With `part`, so many tensors are in a file. Returns the file, or the first of several.
    """
    writer = GGUFWriter(path, "llama", split_max_tensors=part)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<end>"])
    writer.add_token_types([1, 1, 3])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), dtype=np.float32))
    for i in range(1, more_tensors + 1):
        writer.add_tensor(f"tensor{i}", np.full((i, 8), i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part else path
