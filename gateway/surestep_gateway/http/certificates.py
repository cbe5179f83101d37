"""Certificates that are renewed while the gateway runs: --enable-ssl-refresh."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from surestep_gateway.settings.server_settings import HttpSettings

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class CertificateWatch:
    """Loads the files of a TLS context again when they change; open connections keep theirs."""

    def __init__(self, context: ssl.SSLContext | None, settings: HttpSettings) -> None:
        """Nothing is watched without a context, or where it was not asked for."""
        self._context = context if settings.enable_ssl_refresh else None
        self._chain = settings.ssl_certfile, settings.ssl_keyfile
        self._authorities = settings.ssl_ca_certs
        self._seen = self._stamps()

    async def run(self) -> None:
        """Watch until cancelled."""
        while self._context is not None:
            await asyncio.sleep(LOOK_S)
            stamps = self._stamps()
            if stamps != self._seen:
                self._seen = stamps  # those that don't go together are tried again as one changes
                self._load(self._context)

    def _stamps(self) -> list[tuple[int, ...]]:
        """Return what changes with each file; empty for one that is not there just now."""
        return [_stamp(path) for path in (*self._chain, self._authorities) if path is not None]

    def _load(self, context: ssl.SSLContext) -> None:
        """Load the files if they go together."""
        certificate, key = self._chain
        assert certificate is not None
        try:
            # One context to try them: half of a new pair would spoil the one in use.
            for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                one.load_cert_chain(certificate, key)
                if self._authorities is not None:
                    one.load_verify_locations(self._authorities)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the changed certificate is not used yet: %s", error)
        else:
            logger.info("%s has changed and is used from now on", certificate)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
