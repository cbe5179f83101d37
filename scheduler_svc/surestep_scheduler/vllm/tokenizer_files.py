"""The files of a model's tokenizer in one archive, for clients that tokenise themselves."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import NotFound, RequestTooLarge
from surestep_common.model_files import read

MAX_BYTES = 64 << 20  # of all of them; the largest have some 40 MB
# config.json, for receivers find the kind of model there.
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_PATTERNS = ("*.model", "*.tiktoken", "*.jinja")
_TOKENISE = ("tokenizer", "vocab", ".model", ".tiktoken")  # one of these in a name that is enough


class Bundle(NamedTuple):
    """An archive and its SHA-256 in hex."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, folder: Path) -> Bundle:
        """Make the bundle of a folder. Raises what `archive` raises."""
        data = archive(folder)
        return cls(data, hashlib.sha256(data).hexdigest())


class Bundles:
    """The bundle of one model at a time, made once for all that ask."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Bundle] = {}
        self._making = asyncio.Lock()

    async def get(self, folder: str, fingerprint: str) -> Bundle:
        """Return the bundle of the model in a folder. Raises NotFound or RequestTooLarge."""
        async with self._making:
            key = (folder, fingerprint)
            if key not in self._made:
                self._made = {key: await asyncio.to_thread(Bundle.of, Path(folder))}
            return self._made[key]


def archive(folder: Path) -> bytes:
    """Return a zip of the files, not compressed; the same bytes for the same files.

    Raises NotFound where there is no tokenizer, RequestTooLarge where it is too large to send, and
    InvalidRequest for a link out of the folder: what is there is no client's to read.
    """
    found = {path for name in _NAMES if (path := folder / name).is_file()}
    found |= {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    if not any(part in path.name for path in found for part in _TOKENISE):
        raise NotFound(
            f"the scheduler's machine has no tokenizer in {folder}: give the client the files"
        )
    if sum(path.stat().st_size for path in found) > MAX_BYTES:
        raise RequestTooLarge(f"the tokenizer's files have more than {MAX_BYTES} bytes")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as out:
        for path in sorted(found):
            out.writestr(zipfile.ZipInfo(path.name), read(path))
    return buffer.getvalue()
