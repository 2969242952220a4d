"""The HTTP server of a monitor process, which can move to another address while it runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ziplog.errors import ConfigError, UnavailableError
from ziplog.monitor.server import Monitor

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.config_tables import MonitorConfig
    from ziplog.monitor.server import Snapshots


class MonitorService:
    """Serves snapshots at one address at a time."""

    def __init__(self, snapshots: Snapshots) -> None:
        """Prepare to serve `snapshots`."""
        self._snapshots: Final = snapshots
        self._address = ("", 0)
        self._server: Monitor | None = None

    @property
    def endpoint(self) -> str:
        """Where it listens, "host:port"; "": nowhere."""
        return self._server.endpoint if self._server is not None else ""

    def serve(self, settings: MonitorConfig, directory: Path) -> None:
        """Serve as the settings say from now on; port 0: at any free port.

        Args:
            settings: the address, and the file with the token.
            directory: where a relative path of that file starts.

        Raises:
            ConfigError: the file with the token is empty, or cannot be read; nothing changes.
            UnavailableError: it cannot listen there; nothing changes.

        """
        token = read_token(settings.token_file, directory)
        address = (settings.host, settings.port)
        if self._server is not None and address == self._address:
            self._server.token = token
            return
        former = self._server
        if former is not None and settings.port == self._address[1]:
            self.stop()  # The system may refuse both at once: 0.0.0.0 contains all addresses.
        try:
            server = self._listen(address, token)
        except UnavailableError:
            if former is not None and self._server is None:
                self._start(self._listen(self._address, former.token))
            raise
        self.stop()
        self._address = address
        self._start(server)

    def _listen(self, address: tuple[str, int], token: str) -> Monitor:
        try:
            return Monitor(*address, self._snapshots, token)
        except OSError as error:
            where = "{}:{}".format(*address)
            raise UnavailableError(f"cannot listen at {where}: {error.strerror}") from error

    def _start(self, server: Monitor) -> None:
        self._server = server
        threading.Thread(target=server.serve_forever, name="monitor", daemon=True).start()

    def stop(self) -> None:
        """Stop to listen; connections that are open get their replies."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def read_token(file: str | None, directory: Path) -> str:
    """Return the token in a file; "": no file was given.

    Raises:
        ConfigError: it is empty, or cannot be read.

    """
    if file is None:
        return ""
    path = directory / file
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sentence = f"cannot read the token file {path}: {reason}"
        raise ConfigError("token file", str(path), "readable", message=sentence) from error
    if not token:
        raise ConfigError("token file", str(path), "a file that contains a token")
    return token
