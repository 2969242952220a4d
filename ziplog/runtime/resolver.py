"""Addresses of hosts, looked up in threads, because a lookup may take seconds."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Final

from ziplog.core.units import NS_PER_S

#: Time for which an address is used without another lookup.
_VALID_NS: Final = 10 * NS_PER_S


class Resolver:
    """Looks up IPv4 addresses. For one thread."""

    def __init__(self) -> None:
        """Start without addresses."""
        #: By host: an address, and the time until which it is used.
        self._found: Final[dict[str, tuple[str, int]]] = {}
        #: By host: why its last lookup failed.
        self._problems: Final[dict[str, str]] = {}
        self._pending: Final[set[str]] = set()

    def address_of(self, host: str) -> str | None:
        """Return the address of `host`; None: a lookup was started or is pending. Never blocks."""
        with contextlib.suppress(OSError):
            socket.inet_pton(socket.AF_INET, host)
            return host
        address, valid_until = self._found.get(host, ("", 0))
        if time.monotonic_ns() < valid_until:
            return address
        if host not in self._pending:
            self._pending.add(host)
            with contextlib.suppress(RuntimeError):  # The system refuses a thread now.
                threading.Thread(target=self._look_up, args=(host,), daemon=True).start()
                return None
            self._pending.discard(host)
        return None

    def problem(self, host: str) -> str:
        """Return why the last lookup of `host` failed; "": it has not ended, or succeeded."""
        return self._problems.get(host, "")

    def _look_up(self, host: str) -> None:
        try:
            found = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)
            *_, (address, *_) = found[0]
            self._found[host] = str(address), time.monotonic_ns() + _VALID_NS
            self._problems.pop(host, None)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not a host name"
            self._problems[host] = f"the name does not resolve: {reason}"
        finally:
            self._pending.discard(host)
