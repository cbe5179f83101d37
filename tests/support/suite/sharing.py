"""How pytest-xdist shares the tests out when those of one server, or of one model, stay together."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_SERVER = re.compile(r"tests/promises/recovery/.*\b((?:none|ngram|mtp|glm)-tp\d)")
# Each has one server at most, compiles once, or makes models that all its tests read.
_MODULE = re.compile(
    r"tests/(?:abuse|clients|e2e|kernels(?=/test_(?:build|prebuilt))|worker|promises/(?:speculation"
    r"|recovery(?=/test_(?:group|poisoned|silly))))(?:/\w+)*/test_\w+\.py"
)


class ByServer(LoadScopeScheduling):  # type: ignore[misc]  # published without types
    """One test after the other, but those of one server or model in one worker: made once."""

    def _split_scope(self, nodeid: str) -> str:
        if (server := _SERVER.search(nodeid)) is not None:
            return server[1]
        module = _MODULE.search(nodeid)
        return module[0] if module is not None else nodeid
