"""Tell whether a rank follows grammars, and how many drafts they may force."""

from __future__ import annotations

from pathlib import Path

from surestep_kernels import KernelSet

from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.grammar.compiler import Compiler
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.models import Model

MOST_FORCED = 8  # drafts of a window; a name of a field with its quotes has that many


def grammar_table(settings: WorkerSettings, model: Model, tp: TensorParallel) -> GrammarTable:
    """Return the table of a rank's grammars: rank 0 follows them with the model's tokenizer."""
    vocab_size, folder = model.config.vocab_size, settings.model
    path = Path(folder or "") / "tokenizer.json"
    if not model.has_head or not path.is_file():
        missing = f"{path} is missing" if model.has_head else "the model has no output head"
        fault = f"grammar: not served: {missing}"
        return GrammarTable(vocab_size, None, fault)
    eos_ids = list(model.config.eos_token_ids)
    compiler = Compiler(path, vocab_size, eos_ids) if tp.rank == 0 else None
    return GrammarTable(vocab_size, compiler)


def most_forced(model: Model, kernels: KernelSet) -> int:
    """Return how many drafts of a window grammars may force.

    No more than are proposed, where the host does not see a step's drafts before its pass, and
    where recurrent layers would have to keep more records of every slot.
    """
    recurrent = model.recurrent_spec() is not None
    return 0 if recurrent or not kernels.step.synchronous else MOST_FORCED
