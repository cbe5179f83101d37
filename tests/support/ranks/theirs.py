"""What one rank of the tests of transformers' models runs, on checkpoint after checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import surestep_worker.models.transformers  # noqa: F401  # before torch computes anything
import torch
from support.parity.architectures import steps_of
from support.ranks.tensor_parallel import TIMEOUT_S
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.models.transformers.model import TransformersModel
from torch import Tensor, nn

LENGTH = 40
CUTS = (5, 6, 20, LENGTH)


class Told(NamedTuple):
    """What a rank has to say of a model."""

    logits: Tensor  # of a sequence in one piece
    in_pieces: Tensor
    weight_bytes: int
    refused: str  # by the rehearsal, once rank 1 computes rows of each other


def ids_of(vocab_size: int) -> list[int]:
    """Return the tokens that all are asked about."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocab_size, (LENGTH,), generator=generator).tolist()


def rank_main(rank: int, address: str, folder: Path, names: Sequence[str]) -> None:
    """Serve the checkpoints `names` in `folder` on two ranks; write down what came of them."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, 2, address, "cpu", TIMEOUT_S)
    for name in names:
        told = tell(folder / name, tp, expert_parallel=name.endswith("expert-parallel"))
        torch.save(told._asdict(), folder / f"{name}.rank{rank}")
    tp.close()


def tell(folder: Path, tp: TensorParallel, *, expert_parallel: bool = False) -> Told:
    """Serve a checkpoint on one rank of a group."""
    kernels = load_kernels("cpu", "auto")
    model = load_model(
        ModelSource(folder, implementation="transformers"),
        dtype="float32",
        device="cpu",
        tp=tp,
        kernels=kernels,
        expert_parallel=expert_parallel,
    )
    assert isinstance(model, TransformersModel)
    model.rehearse()
    ids = ids_of(model.config.vocab_size)
    with torch.inference_mode():
        steps = (steps_of(model, kernels, ids, it) for it in ((LENGTH,), CUTS))
        whole, cut = (tp.broadcast(torch.cat([*logits])) for logits in steps)
    return Told(whole, cut, model.weight_bytes, _refused(model, tp))


def _refused(model: TransformersModel, tp: TensorParallel) -> str:
    if tp.rank == tp.size - 1:
        model._decoder.register_forward_hook(_crowd)
    try:
        model.rehearse()
    except InvalidRequest as error:
        return error.message
    return ""


def _crowd(module: nn.Module, args: Any, made: Any) -> None:
    """Add to each row a little of all of them."""
    hidden: Tensor = made[0]
    hidden += 1e-3 * hidden.mean(dim=1, keepdim=True)
