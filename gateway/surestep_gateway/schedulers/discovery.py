"""Schedulers found at run time: the places that keep lists of their addresses, and how each is
asked.

A place in trouble changes nothing: what it said last stands until it says something else. Each
trouble is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from surestep_common.errors import Unavailable

from surestep_gateway.schedulers.endpoint_slices import follow_slices
from surestep_gateway.settings.scheduler_urls import (
    AddressFile,
    DnsName,
    KubernetesService,
    Place,
    member,
)

logger = logging.getLogger(__name__)

MOST_MEMBERS = 256  # of one place: each costs three streams and a question a second
RETRY_S = 1.0  # after a trouble, doubled with each, and between two looks at a file
_LONGEST_RETRY_S = 15.0
DNS_EVERY_S = 5.0  # as long as the records of a headless service live
_DNS_S = 4.0  # for an answer
_MOST_BYTES = 1 << 20  # of a file


class Discovery:
    """Follows one place. `run` must be running."""

    def __init__(self, url: str, place: Place, on_found: Callable[[Collection[str]], None]) -> None:
        """`on_found` is told all addresses, at first and whenever they are others."""
        self.trouble = ""  # why its list may be stale; empty while it is not
        self._url = url
        self._place = place
        self._on_found = on_found
        self._found: Sequence[str] | None = None  # sorted; None before the first answer

    async def run(self) -> None:
        """Ask, and tell what is found, until cancelled."""
        pause_s = RETRY_S
        while True:
            try:
                async for found in _lists(self._place):
                    self._take(sorted(set(found)))
                    pause_s = RETRY_S
            except Unavailable as error:
                self._complain(error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _take(self, found: Sequence[str]) -> None:
        if len(found) > MOST_MEMBERS:
            self._complain(f"more than {MOST_MEMBERS}, the others get no requests")
        elif not found:
            self._complain("there are none")
        elif self.trouble:
            logger.info("schedulers of %s: %d are known again", self._url, len(found))
            self.trouble = ""
        found = found[:MOST_MEMBERS]
        if found != self._found:
            self._found = found
            self._on_found(found)

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.warning("schedulers of %s: %s", self._url, trouble)
        self.trouble = trouble


def _lists(place: Place) -> AsyncIterator[Collection[str]]:
    """Yield the addresses again and again; raise Unavailable for a reason why they are not known.

    The end means that all has to be asked anew.
    """
    match place:
        case DnsName():
            return _records(place)
        case AddressFile():
            return _lines(place)
        case KubernetesService():
            return follow_slices(place)


async def _lines(place: AddressFile) -> AsyncIterator[Collection[str]]:
    """Follow a file with an address a line; `#` begins a comment."""
    seen: tuple[int, ...] | None = None
    while True:
        try:
            found = place.path.stat()
            if not stat.S_ISREG(found.st_mode):  # to open a pipe may take for ever
                raise Unavailable("it is no file")
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
            if stamp != seen:
                yield _addresses(place)
        except OSError as error:
            raise Unavailable(f"cannot read the file: {error.strerror}") from error
        seen = stamp
        await asyncio.sleep(RETRY_S)


def _addresses(place: AddressFile) -> list[str]:
    """Return the addresses of a file, all of them or none. Raise Unavailable, OSError."""
    with place.path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise Unavailable(f"the file has more than {_MOST_BYTES} bytes")
    found = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(member(text))
            except ValueError as error:
                raise Unavailable(f"line {number} has {error}") from None
    return found


async def _records(place: DnsName) -> AsyncIterator[Collection[str]]:
    """Ask for the records of a name every few seconds."""
    from dns.exception import DNSException, Timeout

    while True:
        try:
            yield await (_srv(place) if place.port is None else _hosts(place, place.port))
        except Timeout as error:
            raise Unavailable("no name server answers") from error
        except (DNSException, OSError) as error:  # behind the colon: what each server said
            raise Unavailable(str(error).partition(":")[0] or "no answer") from error
        await asyncio.sleep(DNS_EVERY_S)


async def _hosts(place: DnsName, port: int) -> list[str]:
    """Return IPv4 addresses, or those of IPv6 where there are no others: pods may have both."""
    for kind, form in (("A", "{}:{}"), ("AAAA", "[{}]:{}")):
        if records := await _resolve(place, kind):
            return [form.format(one.address, port) for one in records]
    return []


async def _srv(place: DnsName) -> list[str]:
    """Return host and port of every record, whatever its priority and weight."""
    records = await _resolve(place, "SRV")
    targets = [(one.target.to_text().removesuffix("."), one.port) for one in records]
    return [f"{host}:{port}" for host, port in targets if host]


async def _resolve(place: DnsName, kind: str) -> Sequence[Any]:
    """Return the records of a kind, none for a name that does not exist. Raise DNSException."""
    from dns.asyncresolver import Resolver
    from dns.resolver import NXDOMAIN

    own = place.server is not None
    resolver = Resolver(configure=not own)
    if place.server is not None:
        resolver.nameservers, resolver.port = [place.server[0]], place.server[1]
    try:
        answer = await resolver.resolve(
            place.name, kind, raise_on_no_answer=False, lifetime=_DNS_S, search=not own
        )
    except NXDOMAIN:
        return []
    return [*answer.rrset] if answer.rrset is not None else []
