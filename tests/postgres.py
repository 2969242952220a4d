"""A PostgreSQL server of a test session: in a directory of its own, on a Unix socket.

The programs are those of Debian's package `postgresql`. They refuse to run as root, so root runs
them as the user `postgres`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PROGRAMS: Final = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_USER: Final = "postgres"


def why_not() -> str:
    """Return why there is no server on this machine; "": there can be one."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'ziplog[postgres]'"
    if not _PROGRAMS and shutil.which("initdb") is None:
        return "no PostgreSQL server is installed: apt-get install postgresql"
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL does not run as root, and there is no runuser"
    return ""


class Server:
    """A running server."""

    def __init__(self) -> None:
        self._directory: Final = Path(tempfile.mkdtemp(prefix="ziplog-postgres-"))
        self.dsn: Final = f"host={self._directory} dbname=postgres user={_USER}"
        if os.geteuid() == 0:
            shutil.chown(self._directory, _USER)
        try:
            self._run("initdb", "--no-sync", "--auth=trust", f"--username={_USER}")
            self._start()
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def _start(self) -> None:
        options = f"-k {self._directory} -c listen_addresses= -c max_connections=40 -c fsync=off"
        log = str(self._directory / "log")
        self._run("pg_ctl", "start", "--wait", "--log", log, "--options", options)

    def crash(self) -> None:
        """Kill the server without a checkpoint, and start it again."""
        self._run("pg_ctl", "stop", "--mode=immediate")
        self._start()

    def stop(self) -> None:
        """Stop the server, and delete its directory."""
        self._run("pg_ctl", "stop", "--mode=immediate")
        shutil.rmtree(self._directory)

    def _run(self, program: str, *arguments: str) -> None:
        path = str(_PROGRAMS[-1] / program) if _PROGRAMS else program
        command = [path, *arguments, "--pgdata", str(self._directory / "data")]
        if os.geteuid() == 0:
            command = ["runuser", "-u", _USER, "--", *command]
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout[-2000:]}")
