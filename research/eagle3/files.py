"""Working folder: written conversations with their states, in parts that are whole
or not there; and the head that is made of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .conversations import Written
from .head import Eagle3Head, HeadShape
from .writing import Observed

_PART_TOKENS = 5_000
_HELD_OUT = 20  # every so manieth conversation is not learnt from


class Conversations(NamedTuple):
    """Learnt from, and held out."""

    train: list[Observed]
    held_out: list[Observed]


class Parts:
    """The conversations in a folder."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        """Raises ValueError for a folder whose conversations were observed at other layers."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, about = folder, folder / "layers.json"
        if about.exists() and json.loads(about.read_text()) != list(layers):
            raise ValueError(f"{folder} was written with --layers {json.loads(about.read_text())}")
        about.write_text(json.dumps(list(layers)))
        self._waiting = list[Observed]()

    def paths(self) -> list[Path]:
        """In the order in which they were written."""
        return sorted(self._folder.glob("*.safetensors"))

    def tokens(self) -> int:
        """Count the tokens that have been saved."""
        return sum(int(path.stem.partition("-")[2]) for path in self.paths())

    def add(self, observed: Observed) -> bool:
        """Keep one more; return whether a part has become full and was saved."""
        self._waiting.append(observed)
        tokens = sum(len(each.written.ids) for each in self._waiting)
        if tokens < _PART_TOKENS:
            return False
        path = self._folder / f"{time.time_ns()}-{tokens}.safetensors"
        save_file(_packed(self._waiting), path.with_suffix(".unfinished"))
        os.rename(path.with_suffix(".unfinished"), path)
        self._waiting = []
        return True

    def read(self) -> Conversations:
        """All that has been saved."""
        found = [each for path in self.paths() for each in _unpacked(path)]
        train = [each for i, each in enumerate(found) if i % _HELD_OUT]
        return Conversations(train, found[::_HELD_OUT])


def _packed(conversations: Sequence[Observed]) -> dict[str, Tensor]:
    return {
        "lengths": torch.tensor([len(each.written.ids) for each in conversations]),
        "ids": torch.tensor([i for each in conversations for i in each.written.ids]),
        "answered": torch.tensor([i for each in conversations for i in each.written.answered]),
        "captured": torch.cat([each.captured for each in conversations]),
        "hidden": torch.cat([each.hidden for each in conversations]),
    }


def _unpacked(path: Path) -> Iterator[Observed]:
    held, begin = load_file(path), 0
    for length in held["lengths"].tolist():
        at = slice(begin, begin + length)
        written = Written(held["ids"][at].tolist(), held["answered"][at].tolist())
        yield Observed(written, held["captured"][at], held["hidden"][at])
        begin += length


def draft_vocabulary(conversations: Sequence[Observed], size: int, vocab_size: int) -> Tensor:
    """The tokens i64[size] most frequent in answers, ascending; then in questions, then the first.

    The latter are the commonest pieces of a byte-pair vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for each in conversations:
        ids, answered = torch.tensor(each.written.ids), torch.tensor(each.written.answered)
        counts += torch.bincount(ids[answered], minlength=vocab_size)
        counts += torch.bincount(ids, minlength=vocab_size) * 1e-6
    counts -= torch.arange(vocab_size) * 1e-12
    return counts.topk(min(size, vocab_size)).indices.sort().values


def save_head(
    folder: Path,
    head: Eagle3Head,
    token_ids: Tensor,
    layers: Sequence[int],
    vocab_size: int,
    lm_head: Tensor | None,
    max_position: int,
) -> None:
    """Write a head as others publish theirs.

    `lm_head` [D, H] are the rows of the model's output head for `token_ids`; None: the worker takes
    them from the model.
    """
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": max_position,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(token_ids),
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "fc_norm": True,
        "norm_before_residual": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    tensors = {name: x.detach().bfloat16().contiguous() for name, x in head.state_dict().items()}
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    if lm_head is not None:
        tensors["lm_head.weight"] = lm_head.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_head(folder: Path, shape: HeadShape) -> Eagle3Head:
    """Return a head that `save_head` wrote; what it drafts from is chosen anew."""
    head, apart = Eagle3Head(shape), ("d2t", "lm_head.weight")
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict({name: x.float() for name, x in tensors.items() if name not in apart})
    return head
