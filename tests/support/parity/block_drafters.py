"""Models of the matrix with drafters that draft whole windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.checkpoints.dflash import make_counting_pair, save_drafter, sizes_for
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.bench import BLOCKS, HEAD, make_model
from support.parity.cases import EOS, VOCAB
from support.references.dflash import KINDS, DFlashReference


def make_dflash(folder: Path) -> None:
    """A dense model that counts on from its own text, and a drafter that does the same."""
    make_counting_pair(folder, folder / BLOCKS)


def make_dflash_hybrid(folder: Path) -> None:
    """A hybrid, and a drafter of random weights, one layer of it with a window."""
    make_tiny_hybrid(folder, vocab=VOCAB, mtp=False, eos_token_ids=(EOS,), seed=7)
    made = DFlashReference(
        sizes_for(folder), layer_types=KINDS, mask_id=VOCAB - 1, target_layer_ids=(0, 1)
    )
    save_drafter(folder / BLOCKS, made, num_target_layers=4)


def make_peagle(folder: Path) -> None:
    """The checkpoint of the matrix, and a head of random weights that drafts all at once."""
    make_model(folder)
    head = make_reference(folder, num_captured=2, mask_id=VOCAB - 1)
    about: Any = {"parallel_drafting": True, "mask_token_id": VOCAB - 1}
    save_head(folder / HEAD, head, layer_ids=(1, 2), **about)
