"""Results of probes of a GPU, kept on disk under everything that they depend on.

A file counts only if `save_result` wrote it for the very same GPU, software and weights; otherwise
the GPU is probed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from surestep_common.config import cache_dir

logger = logging.getLogger(__name__)

Identity = dict[str, Any]  # of the GPU, the software and the weights; JSON
Shape = tuple[int, int]  # of a weight: N, K


class ProbeResult(NamedTuple):
    """The result of a probe (probe.py)."""

    unequal: str  # the first comparison whose bits differ; empty = none
    cublas: frozenset[Shape] = frozenset()  # weights whose products it computes to the same bits
    narrow: bool = False  # quantised weights by narrower instructions have the bits of the widest
    finished: bool = True  # everything was compared, or something differs

    @property
    def equal(self) -> bool:
        """Return whether every product that was compared has the same bits."""
        return self.finished and not self.unequal


def digest_of(identity: Identity) -> str:
    """Return a digest that only equal identities share."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def sources_digest(paths: Iterable[Path]) -> str:
    """Return a digest of the code that was probed."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def default_folder() -> Path:
    """Return the folder in which results are kept between runs."""
    return cache_dir() / "products"


def load_result(identity: Identity, folder: Path) -> ProbeResult | None:
    """Return the result of an earlier run, or None."""
    try:
        content = json.loads(_path(identity, folder).read_bytes())
        if content["identity"] != identity:
            raise ValueError("it is of another card or model")
        shapes = frozenset((int(n), int(k)) for n, k in content["cublas"])
        return ProbeResult(_text(content["unequal"]), shapes, content["narrow"] is True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        logger.warning("%s is ignored: %r", _path(identity, folder), error)
        return None


def save_result(result: ProbeResult, identity: Identity, folder: Path) -> None:
    """Save a result for later runs; ranks that write at once write the same. Log failures."""
    if not result.finished:
        return
    content = {"identity": identity, "unequal": result.unequal, "narrow": result.narrow}
    content["cublas"] = sorted(result.cublas)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(dir=folder, prefix=".result-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            Path(fresh).replace(_path(identity, folder))
        except OSError:
            with contextlib.suppress(OSError):
                Path(fresh).unlink()
            raise
    except OSError as error:
        logger.warning("probe results cannot be kept in %s: %s", folder, error)


def _path(identity: Identity, folder: Path) -> Path:
    return folder / f"{digest_of(identity)}.json"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
