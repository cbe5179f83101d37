"""Parameters of models: weights in the kernels' layout, prepared once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.linear import WeightFormat
from torch import Tensor

from .held_weights import StaleWeights
from .parameters import CheckpointWeights, Piece
from .weight_store import Record, WeightStore

logger = logging.getLogger(__name__)

_TENSORS = ("data", "bias", "scales", "zeros", "mins")
_FACTS = ("in_features", "out_features", "format", "group_size")


class Weights:
    """The parameters of one rank, each to be taken once.

    Those of a sealed store are mapped as they are. Others are read from the checkpoint, prepared,
    and written to the store; the model gets them from the store in both cases.
    """

    def __init__(
        self, store: WeightStore, checkpoint: CheckpointWeights | None, device: str
    ) -> None:
        """`checkpoint` is given for a store that is not sealed."""
        assert (checkpoint is None) == store.sealed
        self._store = store
        self._checkpoint = checkpoint
        self._device = device
        self._taken: set[str] = set()
        self._copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self.packed: list[PackedLinear] = []  # linear layers that were taken

    def __contains__(self, name: str) -> bool:
        if self._checkpoint is None:
            return name in self._store
        return name in self._checkpoint or f"{name}.weight" in self._checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, in the types of the checkpoint and the settings."""
        if self._checkpoint is None:
            return int(self._store.facts["weight_bytes"])
        return self._checkpoint.bytes_taken

    def take(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        prepare: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Tensor:
        """Return one parameter, in the model's dtype unless another is given, after `prepare`."""

        def read(checkpoint: CheckpointWeights) -> Record:
            return Record({"data": prepare(checkpoint.take(name, dtype))}, {})

        return self._place(self._record(name, read).tensors["data"])

    def take_packed(
        self, name: str, pack: Callable[[CheckpointWeights], PackedLinear]
    ) -> PackedLinear:
        """Return one linear layer; `pack` reads it from the checkpoint and packs it."""

        def read(checkpoint: CheckpointWeights) -> Record:
            packed = pack(checkpoint)
            parts = {part: getattr(packed, part) for part in _TENSORS}
            facts: dict[str, Any] = {fact: int(getattr(packed, fact)) for fact in _FACTS}
            facts["pieces"] = checkpoint.pieces(f"{name}.weight")
            return Record({k: v for k, v in parts.items() if v is not None}, facts)

        tensors, facts = self._record(name, read)
        tensors = {part: self._place(tensor) for part, tensor in tensors.items()}
        packed = PackedLinear(
            data=tensors["data"],
            bias=tensors.get("bias"),
            in_features=facts["in_features"],
            out_features=facts["out_features"],
            format=WeightFormat(facts["format"]),
            group_size=facts["group_size"],
            scales=tensors.get("scales"),
            zeros=tensors.get("zeros"),
            mins=tensors.get("mins"),
        )
        self.packed.append(packed)
        return packed

    def pieces(self, name: str) -> list[Piece]:
        """Return the linear layers of the model that a layer which was taken is made of."""
        return [Piece(*piece) for piece in self._store.get(name).facts["pieces"]]

    def in_host_memory(self, name: str) -> Tensor:
        """Return a parameter that was taken before, to build another layout of it."""
        return self._store.get(name).tensors["data"]

    def _record(self, name: str, read: Callable[[CheckpointWeights], Record]) -> Record:
        assert name not in self._taken, f"{name} is taken twice"
        self._taken.add(name)
        if self._checkpoint is not None:
            self._store.put(name, read(self._checkpoint))
        return self._store.get(name)

    def _place(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the model's device; parameters that share memory share it there,
        too."""
        if self._device == "cpu":
            return tensor
        key = tensor.data_ptr(), tuple(tensor.shape)
        if key not in self._copies:
            self._copies[key] = tensor.pin_memory().to(self._device, non_blocking=True)
        return self._copies[key]

    def finish(self) -> None:
        """Assert that the model has taken every parameter."""
        left = self._store.names() - self._taken
        assert not left, f"parameters never taken: {sorted(left)}"


@contextlib.contextmanager
def prepared(
    store: WeightStore,
    facts: Mapping[str, Any],
    kernels: KernelSet,
    device: str,
    open_checkpoint: Callable[[], CheckpointWeights],
) -> Iterator[Weights]:
    """Yield the weights of a rank, laid out for its kernels.

    The checkpoint is opened only for a store that is not sealed, which is sealed at the end with
    the model's `facts`. Raises StaleWeights for weights that were prepared by other kernels.
    """
    if store.sealed:
        if store.facts["layout"] != kernels.name:
            raise StaleWeights(
                f"weights for {store.facts['layout']} kernels, not for {kernels.name}"
            )
        weights = Weights(store, None, device)
        logger.info("weights: %d MB are in memory already", weights.nbytes >> 20)
        yield weights
    else:
        with open_checkpoint() as checkpoint:
            weights = Weights(store, checkpoint, device)
            yield weights
        facts = {"layout": kernels.name, "weight_bytes": weights.nbytes, **facts}
        store.seal(facts, kernels.code)
    weights.finish()
    if kernels.products is not None:
        kernels.products.register(weights.packed)
