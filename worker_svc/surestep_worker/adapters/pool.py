"""The adapters of one rank, by place, in memory that outlives the rank.

A place is written beside the steps, of which none names it before every rank has it, and sealed at
the end with a digest of its bytes. A rank that comes later finds the places that are whole.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels.add_adapters import AdapterWeights
from surestep_proto import worker_pb2 as pb
from torch import Tensor

from surestep_worker.cache.cache_memory import CacheMemory
from surestep_worker.checkpoint.model_folder import some
from surestep_worker.checkpoint.parameters import Piece

from .folder import PARAM, AdapterFolder, read_folder
from .kernels import AdaptedProduct, AdaptedRows
from .shares import Share, Words, canonical, shares_of

logger = logging.getLogger(__name__)

_ABOUT_BYTES = 2048  # of JSON about an adapter
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Sizes(NamedTuple):
    """Sizes of a pool."""

    places: int
    rank: int  # the greatest


class _Part(NamedTuple):
    """A linear layer of the model within a product."""

    product: str
    item: int  # expert, where the product has one of each
    number: int
    pieces: list[tuple[int, Piece]]  # by the product's first output that is of it


class _Product(NamedTuple):
    """A product, and its adapters on the host and on the device."""

    items: int  # an adapter has a place of the weights for each
    host: AdapterWeights
    device: AdapterWeights  # the same memory on a CPU
    words: list[Words]  # the same memory as a, b, ranks and scales of the host

    def at(self, place: int) -> slice:
        """Return the places in the weights of the adapter at a place."""
        return slice(place * self.items, (place + 1) * self.items)


class AdapterPool:
    """Adapters at places 0 to S - 1. `load` runs beside the steps, in one thread at a time."""

    def __init__(
        self,
        rows: AdaptedRows,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        memory: CacheMemory | None,
    ) -> None:
        """Map the places in `memory`, or make them in memory of this process."""
        self.sizes, self.rows = sizes, rows
        self._dtype, self._device = dtype, device
        layout = [(name, p.packed.in_features, p.items) for name, p in rows.products.items()]
        identity = blake2b(repr((sizes, dtype, layout)).encode(), digest_size=32).digest()
        self._memory = memory
        head = self._tensor((4,), torch.int64).numpy()
        self._seals = self._tensor((sizes.places, 2), torch.int64).numpy()  # 1 = whole; digest
        self._abouts = self._tensor((sizes.places, _ABOUT_BYTES), torch.uint8).numpy()
        self._parts = {
            canonical(layer): part
            for name, product in rows.products.items()
            for layer, part in _parts(name, product)
        }
        self._products = {name: self._product(p, dtype) for name, p in rows.products.items()}
        self._layers = {
            f"{canonical(module)}.{expert}.{layer}": size
            for module, stack in rows.stacks.items()
            for expert in range(stack.experts)
            for layer, size in stack.layers.items()
        }
        self._layers |= {name: part.pieces[0][1].size for name, part in self._parts.items()}
        if head.tobytes() != identity:
            self._seals[...] = 0
            head[:] = np.frombuffer(identity, dtype=np.int64)
        self._verify()
        rows.use({name: product.device for name, product in self._products.items()})

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            return torch.zeros(shape, dtype=dtype)
        return self._memory.tensor(shape, dtype)

    def _product(self, product: AdaptedProduct, dtype: torch.dtype) -> _Product:
        (places, rank), items = self.sizes, len(product.items)
        numbers, spans, at = dict[str, int](), list[list[int]](), 0
        for piece in product.items[0]:  # all have the same
            count = piece.end_row - piece.row
            number = numbers.setdefault(piece.module, len(numbers))
            if spans and spans[-1][2] == number:
                spans[-1][1] += count
            else:
                spans.append([at, at + count, number])
            at += count
        parts, packed = len(numbers), product.packed
        host = AdapterWeights(
            self._tensor((places * items, parts, rank, packed.in_features), dtype),
            self._tensor((places * items, rank, packed.out_features), dtype),
            self._tensor((places * items, parts), torch.int32),
            self._tensor((places * items, parts), torch.float32),
            torch.tensor(spans, dtype=torch.int64),
        )
        device = AdapterWeights(*map(self._empty, host))
        device = device._replace(spans=host.spans.to(self._device))
        return _Product(items, host, device, [*map(_words, host[:4])])

    def _empty(self, host: Tensor) -> Tensor:
        """Return what has a tensor on the device; the host's own takes memory where it is read."""
        cpu = self._device.type == "cpu"
        return host if cpu else torch.zeros_like(host, device=self._device)

    @property
    def place_bytes(self) -> int:
        """Return the bytes that one adapter of the greatest rank takes."""
        tensors = (t for product in self._products.values() for t in product.host[:4])
        return sum(t.nbytes for t in tensors) // self.sizes.places

    def held(self) -> list[pb.Adapter]:
        """Return what is at the places that are whole."""
        return [self._about(place) for place in np.flatnonzero(self._seals[:, 0]).tolist()]

    def digest_at(self, place: int) -> str:
        """Return the digest of the adapter at a place; empty if there is none."""
        whole = 0 <= place < self.sizes.places and self._seals[place, 0]
        return self._about(place).digest if whole else ""

    def load(self, wanted: pb.Adapter) -> pb.Adapter:
        """Read an adapter's folder into the place that is wanted; return what is there then.

        Raises ModelNotFound without an adapter there, and InvalidRequest for one that does not fit
        or has another content than `wanted.digest`, if that is given: nothing is touched then.
        """
        if wanted.place >= self.sizes.places:
            raise InvalidRequest(f"there is no place {wanted.place} for an adapter", param=PARAM)
        folder = read_folder(Path(wanted.path))
        shares = shares_of(folder, self.rows.stacks)
        self._check(shares)
        if wanted.only_check:
            return wanted
        data = folder.read()
        digest = folder.digest(data.data)
        if wanted.digest not in ("", digest):
            raise InvalidRequest(f"{wanted.path} holds another adapter than before", param=PARAM)
        tensors = _tensors(folder, data, self._dtype)
        loaded = pb.Adapter(
            name=wanted.name,
            place=wanted.place,
            path=wanted.path,
            digest=digest,
            rank=max(share.rank for share in shares),
        )
        self._write(wanted.place, shares, tensors, loaded)
        return loaded

    def unload(self, place: int) -> None:
        """Forget what is at a place."""
        if place < self.sizes.places:
            self._seals[place] = 0

    def _check(self, shares: Sequence[Share]) -> None:
        """Raise InvalidRequest for modules that this model has not, or has in other sizes."""
        wanted = {share.layer: self._layers.get(share.layer) for share in shares}
        if unknown := {s.source for s in shares if wanted[s.layer] is None}:
            what = f"modules that this model has not, or not for adapters: {some(unknown)}"
            raise InvalidRequest(f"the adapter has {what}", param=PARAM)
        if misshapen := {
            f"{s.source} [{s.outputs}, {s.inputs}] instead of {[*size]}"
            for s in shares
            if (size := wanted[s.layer]) and size != (s.outputs, s.inputs)
        }:
            message = f"the adapter is another model's: {some(misshapen)}"
            raise InvalidRequest(message, param=PARAM)
        if len(wanted) < len(shares):
            raise InvalidRequest("the adapter has a module twice", param=PARAM)
        rank = max(share.rank for share in shares)
        if rank > self.sizes.rank:
            message = f"the adapter has rank {rank}, more than --max-lora-rank"
            raise InvalidRequest(f"{message} {self.sizes.rank}", param=PARAM)

    def _write(
        self, place: int, shares: Sequence[Share], tensors: _Tensors, about: pb.Adapter
    ) -> None:
        self._seals[place] = 0
        for product in self._products.values():
            product.words[2][product.at(place)] = 0
        source, whole = "", None
        for share in shares:
            part = self._parts.get(share.layer)
            if part is None:  # of an expert on another rank
                continue
            if whole is None or share.source != source:
                source, whole = share.source, share.unstacked(*tensors[share.source])
            product, (a, b) = self._products[part.product], (half[share.expert] for half in whole)
            host_a, host_b, ranks, _ = product.words
            at, rank = place * product.items + part.item, share.rank
            ranks[at, part.number] = rank
            host_a[at, part.number, :rank] = a[:, part.pieces[0][1].columns]
            for first, piece in part.pieces:
                mine = b[:, share.rows][:, piece.row : piece.end_row]
                host_b[at, :rank, first : first + mine.shape[1]] = mine
            product.host.scales[at, part.number] = share.scale
        self._send(place)
        text = json.dumps({f.name: value for f, value in about.ListFields()}).encode()
        self._abouts[place] = 0
        self._abouts[place, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._seals[place] = 1, self._digest_of(place)

    def _send(self, place: int) -> None:
        """Copy a place to the device."""
        for product in self._products.values():
            for host, device in zip(product.host[:4], product.device[:4], strict=True):
                if device is not host:
                    device[product.at(place)].copy_(host[product.at(place)])

    def _digest_of(self, place: int) -> int:
        """Return a digest of what is used of a place."""
        digest = zlib.crc32(self._abouts[place])
        for product in self._products.values():
            mine = (words[product.at(place)] for words in product.words)
            for a, b, ranks, scales in zip(*mine, strict=True):
                used = [a[part, :rank] for part, rank in enumerate(ranks.tolist())]
                for words in (ranks, scales, *used, b[: ranks.max()]):
                    digest = zlib.crc32(words, digest)
        return digest

    def _verify(self) -> None:
        """Let go of places that are not as they were sealed, and send the others to the device."""
        for place in np.flatnonzero(self._seals[:, 0]).tolist():
            if self._digest_of(place) != self._seals[place, 1]:
                logger.warning("the adapter at place %d is not whole, and is loaded again", place)
                self._seals[place] = 0
            else:
                self._send(place)

    def _about(self, place: int) -> pb.Adapter:
        return pb.Adapter(**json.loads(self._abouts[place].tobytes().rstrip(b"\0")))


def _parts(name: str, product: AdaptedProduct) -> Iterator[tuple[str, _Part]]:
    """Yield the layers of a product, by the layer's name."""
    for item, pieces in enumerate(product.items):
        parts, at = dict[str, _Part](), 0
        for piece in pieces:
            part = parts.setdefault(piece.module, _Part(name, item, len(parts), []))
            part.pieces.append((at, piece))
            at += piece.end_row - piece.row
        yield from parts.items()


_Tensors = Mapping[str, tuple[Words, Words]]  # A and B by the adapter's module


def _tensors(folder: AdapterFolder, data: Words, dtype: torch.dtype) -> _Tensors:
    """Return A and B of each module in the model's type, from the bytes of the file.

    Raises InvalidRequest for numbers that are not finite in it.
    """
    entries = sorted(
        (half for halves in folder.modules.values() for half in halves),
        key=lambda entry: entry.begin,
    )
    found = dict[int, Words]()  # by the first byte
    for stored, together in groupby(entries, lambda entry: entry.dtype):  # which have no gaps
        run, kind = [*together], _TORCH[stored]
        first, count = run[0].begin, (run[-1].end - run[0].begin) // kind.itemsize
        numbers = torch.frombuffer(data, dtype=kind, count=count, offset=first).to(dtype)
        if not torch.stack(numbers.aminmax()).isfinite().all():
            raise InvalidRequest("the adapter has numbers that are not finite", param=PARAM)
        words = _words(numbers)
        for entry in run:
            at = (entry.begin - first) // kind.itemsize
            found[entry.begin] = words[at : at + math.prod(entry.shape)].reshape(entry.shape)
    return {
        module: (found[halves.a.begin], found[halves.b.begin])
        for module, halves in folder.modules.items()
    }


def _words(tensor: Tensor) -> Words:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
