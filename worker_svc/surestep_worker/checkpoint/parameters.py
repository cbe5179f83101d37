"""Reads checkpoints strictly: nothing missing, nothing left over, nothing twice.

A model declares a table: parameter of this rank -> the checkpoint tensors (or slices of them) that
fill it from the top. The table is compared with the headers of all files before any weight is read,
so a wrong checkpoint fails at once and with every name. Parameters are then taken one at a time, to
be packed before the next is read.

In a quantised checkpoint each linear weight may be quantised or plain: the tensors that the files
hold for it decide, never its name.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import torch
from surestep_kernels import QuantizedWeight
from surestep_kernels.linear import Rounding, alike, concatenate
from torch import Tensor

from surestep_worker.host.read_ahead import ReadAhead

from .formats import FLOATS, Format, Quantization, Share, Stored, read_rounded
from .safetensors_header import Entry
from .tensors import Checkpoint, refuse

Progress = Callable[[int, int], None]  # bytes read so far, bytes to read in all

_DEQUANTIZED = 1 << 20  # elements at once: in memory that is used again and stays in a core's cache

logger = logging.getLogger(__name__)


class TensorSource(NamedTuple):
    """Tensor of a checkpoint, and the slice of its dimension `dim` that this rank keeps.

    With an `item` the source is that element of the tensor's first dimension, which `dim` then does
    not count.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    keep: slice
    dim: int = 0
    item: int | None = None
    dtypes: tuple[str, ...] = FLOATS  # that it may have
    input_major: bool = False  # a linear weight [K, N]

    @property
    def numel(self) -> int:
        """Number of elements kept."""
        shape = self.shape if self.item is None else self.shape[1:]
        if not shape:  # one number
            return 1
        kept = self.keep.stop - self.keep.start
        return math.prod(shape) // shape[self.dim] * int(kept)

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Index of the kept part within the tensor."""
        first = () if self.item is None else (self.item,)
        if len(self.shape) == len(first):
            return first
        return (*first, *(slice(None),) * self.dim, self.keep)

    @property
    def module(self) -> str:
        """Name of the module that a weight belongs to."""
        return self.name.removesuffix(".weight")

    @property
    def share(self) -> Share:
        """The part of a linear weight that this rank keeps."""
        rows, columns = self.shape[-2:][:: -1 if self.input_major else 1]
        keep = range(self.keep.start, self.keep.stop)
        if self.dim == int(self.input_major):
            return Share(self.module, keep, range(columns), inputs=columns)
        return Share(self.module, range(rows), keep, inputs=columns)


class Piece(NamedTuple):
    """A part of a linear layer of the model, which this rank has in one of its products."""

    module: str
    outputs: int  # of the whole layer
    inputs: int
    row: int  # the part's first output
    end_row: int
    column: int  # its first input
    end_column: int

    @property
    def size(self) -> tuple[int, int]:
        """Return outputs and inputs of the whole layer."""
        return self.outputs, self.inputs

    @property
    def columns(self) -> slice:
        """Return the part's inputs."""
        return slice(self.column, self.end_column)


class Parameter(NamedTuple):
    """Tensor of this rank: its sources stacked along dimension 0; rows without source are 0."""

    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    linear: bool = False  # for take_linear: weights that may be quantised
    table: bool = False  # rows to look up: they may be quantised in the files, not in memory
    least_bits: int = 4  # that rounding must leave of a number


Table = Mapping[str, Parameter]


class CheckpointWeights:
    """The parameters of a checked checkpoint, each to be taken exactly once.

    Use as a context manager; leaving it without an error asserts that all were taken.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        table: Table,
        *,
        ignore: Iterable[str] = (),
        quantization: Quantization | None = None,
        dtype: torch.dtype,
        rounding: Rounding | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Compare the tensors of a checkpoint with `table` and open their files.

        `ignore` holds regular expressions of whole names of tensors to ignore. Without
        `quantization` every weight must be unquantised. With `rounding` plain linear weights are
        rounded when they are taken. Raises InvalidRequest naming missing, unexpected, repeated and
        misshapen tensors, those of a wrong type, and those that contradict each other.
        """
        self._table = table
        self._left = dict(table)
        self._quantization, self._round = quantization, rounding
        self.dtype = dtype  # of what is taken, unless another is asked for
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self.bytes_taken = 0  # of the parameters as this rank keeps them
        with contextlib.ExitStack() as stack:
            self._checkpoint = Checkpoint(entries, stack)
            self._formats = self._find_formats(table)
            self._check(table, ignore)
            self._total = sum(self._bytes(s) for p in table.values() for s in p.sources)
            self.bytes_wanted = sum(map(self._bytes_in_memory, table.values()))
            self._stack = stack.pop_all()
        packed = [name for name, p in table.items() if p.linear and self._all_quantized(p)]
        self._read_ahead = ReadAhead(packed, self.quantized, self._stack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        assert kind or not self._left, f"parameters never taken: {sorted(self._left)}"

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read one parameter, in this reader's dtype unless another is given."""
        shape, sources = self._left.pop(name)[:2]
        whole = torch.empty(shape, dtype=dtype or self.dtype)
        parameter, row = whole.view(-1, *shape[1:]), 0
        for source in sources:
            for part in self._plain_parts(source):
                part = part.view(-1, *shape[1:])
                parameter[row : row + len(part)] = part
                row += len(part)
            self._advance(source)
        parameter[row:] = 0
        self.bytes_taken += whole.nbytes
        return whole

    def take_linear(self, name: str) -> Tensor | QuantizedWeight:
        """Read a linear weight, quantised, rounded or plain. Raises what `quantized` raises."""
        ready = self._all_quantized(self._table[name])
        weight = self._read_ahead.get(name) if ready else self.quantized(name)
        if weight is None:
            return self.take(name)
        for source in self._left.pop(name).sources:
            self._advance(source)
        self.bytes_taken += weight.nbytes
        return weight

    def pieces(self, name: str) -> list[Piece]:
        """Return the linear layers that a weight is made of, in order; none of no weight."""
        pieces = list[Piece]()
        for source in self._table[name].sources if name in self._table else ():
            module, rows, columns, inputs, _ = source.share
            outputs = math.prod(source.shape[-2:]) // inputs
            edges = rows.start, rows.stop, columns.start, columns.stop
            pieces.append(Piece(module, outputs, inputs, *edges))
        return pieces

    def as_linear(self, weight: Tensor) -> Tensor | QuantizedWeight:
        """Return a plain weight as linear weights are to be: rounded, if they are."""
        return weight if self._round is None else self._round(weight)

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Read a parameter if all of it is quantised, or to be rounded; it stays to be taken.

        Raises InvalidRequest if it cannot be cut as this rank needs it, or not be rounded.
        """
        parameter = self._table[name]
        sources = [source for source in parameter.sources if source.numel]
        found, rounding = {s.name in self._formats for s in sources}, self._rounding(parameter)
        if found == {True}:
            weights = list[QuantizedWeight]()
            for source in sources:
                weight = self._read_stored(source, source.share)
                if isinstance(weight, Tensor) or not alike([*weights, weight]):
                    logger.info("%s is dequantised: no layout holds it as it is stored", name)
                    return None
                weights.append(weight)
        elif found == {False} and rounding is not None:
            weights = [self._read_rounded(source, rounding) for source in sources]
        else:
            return None
        whole = concatenate(weights)
        rows = parameter.shape[int(sources[0].input_major)]
        return whole.padded(max(rows, len(whole.codes)))

    def _rounding(self, parameter: Parameter) -> Rounding | None:
        """Return what a parameter is rounded to where it is a linear weight."""
        wanted = self._round if parameter.linear or parameter.table else None
        return wanted.keeping(parameter.least_bits) if wanted else None

    def _read_rounded(self, source: TensorSource, rounding: Rounding) -> QuantizedWeight:
        def read(name: str, rows: slice, columns: slice) -> Tensor:
            if source.input_major:
                return self._read_part(source.item, source.name, columns, rows).T
            return self._read_part(source.item, source.name, rows, columns)

        return read_rounded(source.share, rounding, read)

    def _all_quantized(self, parameter: Parameter) -> bool:
        names = [source.name for source in parameter.sources if source.numel]
        return bool(names) and self._formats.keys() >= set(names)

    def _read_stored(self, source: TensorSource, share: Share) -> QuantizedWeight | Tensor:
        if source.name in self._checkpoint:
            share = share._replace(dtype=self._checkpoint.dtype(source.name))
        return self._formats[source.name].read(share, partial(self._read_part, source.item))

    def _plain_parts(self, source: TensorSource) -> Iterator[Tensor]:
        """Yield the rows of a source; quantised ones become float32, some at a time."""
        if not source.numel:
            return
        if source.name not in self._formats:
            yield self._checkpoint.read(source.name, source.place)
            return
        share = source.share
        step = max(1, _DEQUANTIZED // len(share.columns))
        for begin in range(0, len(share.rows), step):
            rows = share.rows[begin : begin + step]
            weight = self._read_stored(source, share._replace(rows=rows))
            yield weight if isinstance(weight, Tensor) else weight.dequantize()

    def _read_part(self, item: int | None, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a matrix; of one with a single column the file may have a vector or, where
        it has one row, too, a number."""
        outer = () if item is None else (item,)
        dims = len(self._checkpoint.shape(name)) - len(outer)
        if dims == 4:  # scales of squares
            return self._checkpoint.read(name, (*outer, rows, 0, columns, 0))
        if dims >= 2:
            return self._checkpoint.read(name, (*outer, rows, columns))
        return self._checkpoint.read(name, outer).reshape(-1, 1)[rows, columns]

    def _advance(self, source: TensorSource) -> None:
        self._done += self._bytes(source)
        self._progress(self._done, self._total)

    def _bytes(self, source: TensorSource) -> int:
        """Return the bytes of a source's tensors that are kept."""
        whole = sum(self._checkpoint.nbytes(name) for name in self._stored(source))
        return whole * source.numel // math.prod(source.shape)

    def _bytes_in_memory(self, parameter: Parameter) -> int:
        """Return the approximate bytes of a parameter in memory."""
        quantized = any(source.name in self._formats for source in parameter.sources)
        if quantized and parameter.linear:
            return sum(map(self._bytes, parameter.sources))
        elements, rounding = math.prod(parameter.shape), self._rounding(parameter)
        if rounding is not None and parameter.linear:
            return rounding.nbytes(elements)
        return elements * self.dtype.itemsize

    def _stored(self, source: TensorSource) -> dict[str, Stored]:
        """Return the checkpoint tensors that hold a source."""
        if source.name not in self._formats:
            return {source.name: Stored(source.shape, source.dtypes)}
        items, (rows, columns) = source.shape[:-2], source.shape[-2:]
        stored = self._formats[source.name].stored(source.module, rows, columns)
        return {name: of._replace(shape=(*items, *of.shape)) for name, of in stored.items()}

    def _find_formats(self, table: Table) -> dict[str, Format]:
        """Return the formats of the sources that are quantised in the files, by name."""
        if self._quantization is None:
            return {}
        modules = {
            source.name: source.module
            for p in table.values()
            if p.linear or p.table
            for source in p.sources
        }
        find = self._quantization.format_of
        held = {name: find(module, self._checkpoint) for name, module in modules.items()}
        found = {name: format_ for name, format_ in held.items() if format_ is not None}
        plain = len(modules) - len(found)
        logger.info("linear weights: %d quantized, %d plain", len(found), plain)
        return found

    def _check(self, table: Table, ignore: Iterable[str]) -> None:
        sources = [source for parameter in table.values() for source in parameter.sources]
        places = [f"{source.name}{source.place}" for source in sources if source.numel]
        assert len(set(places)) == len(places), "a slice fills two places"
        expected = {n: stored for source in sources for n, stored in self._stored(source).items()}
        ignored = [*ignore, *(self._quantization.ignored if self._quantization else ())]
        refuse(self._contradictions(table) | self._checkpoint.check(expected, ignored))

    def _contradictions(self, table: Table) -> dict[str, list[str]]:
        """Return the contradicting sources by kind of problem."""
        if self._quantization is None or self._quantization.merges_with_plain:
            return {}
        modules = {s.module for p in table.values() for s in p.sources if s.name in self._formats}
        merged = [{source.name for source in parameter.sources} for parameter in table.values()]
        quantized = self._formats.keys()
        mixed = [names - quantized for names in merged if names & quantized]
        return {
            "quantized although listed in modules_to_not_convert": [
                module for module in modules if self._quantization.lists_as_plain(module)
            ],
            "plain beside quantized ones they are merged with": sorted(set().union(*mixed)),
        }
