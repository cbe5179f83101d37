"""A family of models: what differs from others, which the one decoder does not know."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.parameters import Table
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext
from .decoder_layer import FeedForward
from .linear import Sharding
from .mlp import GatedMlp

C = TypeVar("C", bound=ModelConfig)
C_contra = TypeVar("C_contra", bound=ModelConfig, contravariant=True)


class ParameterTable(Protocol[C_contra]):
    """Says which checkpoint tensors fill which parameter of one rank.

    `names` are those of the checkpoint: they tell in which form it keeps what.
    """

    def __call__(
        self, config: C_contra, shard: Sharding, names: Set[str], *, draft_head: bool
    ) -> Table: ...


class Ignored(Protocol[C_contra]):
    """Returns regular expressions of the checkpoint tensors that one rank does not want."""

    def __call__(
        self, config: C_contra, shard: Sharding, *, draft_head: bool
    ) -> tuple[str, ...]: ...


class MakeFeedForward(Protocol[C_contra]):
    """Builds the feed-forward block whose parameters' names begin with `to`."""

    def __call__(self, to: str, context: LayerContext[C_contra]) -> FeedForward: ...


def tied_head(config: ModelConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of what holds nothing of its own: a head that is the embedding."""
    return (r"lm_head\.weight",) if config.tie_word_embeddings else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[C]):
    """Architectures that share a configuration and a way to name tensors."""

    architectures: tuple[str, ...]
    parse: Callable[[ConfigFiles], C]  # raises InvalidRequest for what is not served
    parameter_table: ParameterTable[C]
    ignored: Ignored[C] = tied_head
    feed_forward: MakeFeedForward[C] = GatedMlp
    decoder: Callable[[LayerContext[C]], Any] | None = None  # None: the one decoder of all others
    # How the names of its tensors begin; {layers} stands for the number of layers before it.
    draft_head: str | None = None

    def head_begins(self, config: C) -> str | None:
        """Return how the names of a draft head's tensors begin; None: there is none with it."""
        begins = self.draft_head
        return begins.format(layers=config.num_layers) if begins is not None else None
