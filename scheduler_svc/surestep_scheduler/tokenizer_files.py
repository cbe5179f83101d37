"""The files of a model's tokenizer in one archive, for clients that tokenise themselves."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from surestep_common.errors import NotFound, RequestTooLarge

MAX_BYTES = 200 << 20  # of all of them: what receivers take
# config.json, for receivers find the kind of model there.
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json"),
    *("config.json", "generation_config.json"),
)
_PATTERNS = ("*.model", "*.tiktoken", "*.jinja")
_TOKENISE = ("tokenizer", "vocab", ".model", ".tiktoken")  # one of these in a name that is enough


def archive(folder: Path) -> bytes:
    """A zip of the files, not compressed; the same bytes for the same files.

    Raises NotFound where there is no tokenizer, RequestTooLarge where it is too large to send.
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
            out.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    return buffer.getvalue()
