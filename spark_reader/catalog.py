"""Spark sessions that find their Java and Python, and temporary views of the log."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_reader.optional_dependencies import require
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

#: Environment variables of a separate or already running Spark; Java is not searched for then.
_EXTERNAL_SPARK: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT")
#: Timeout of `java -version`, in seconds.
_VERSION_S: Final = 20.0
#: Settings of the connection between Spark's Java and Python processes.
_USE_UNIX_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
_SOCKET_DIRECTORY: Final = "spark.python.unix.domain.socket.dir"
#: Maximum length of the socket directory's path, in bytes: 103 for a socket, 43 for its file name.
_MAX_SOCKET_DIRECTORY: Final = 60
_INSTALL: Final = "install it (apt install openjdk-17-jre-headless)"


def session(
    app_name: str = "ziplog",
    cores: int | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """Return a Spark session in this process, or the session that runs already, unchanged.

    Its workers run this Python interpreter unless PYSPARK_PYTHON is set. Spark reaches them over
    sockets in a directory that only this user can read. Spark listens on loopback only; its web UI
    is off.

    Args:
        app_name: the name of the application.
        cores: the number of concurrent tasks, from 1; None: one per core of the machine.
        memory: of the Java process, in Java's notation: "512m", "2g".
        config: more Spark settings by name; they override those above.

    Raises:
        ConfigError: `cores` is less than 1.
        UnavailableError: pyspark or Java is missing, or Java does not start Spark; the message
            says what was searched, and what to install.

    """
    if cores is not None and cores < 1:
        raise ConfigError("cores", cores, "1 or more, or None")
    require("Spark", "spark", "pyspark", "pyarrow")
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415  may be missing
    from pyspark.sql import SparkSession  # noqa: PLC0415

    if not any(os.environ.get(name) for name in _EXTERNAL_SPARK):
        _find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.master": f"local[{'*' if cores is None else cores}]",
        "spark.app.name": app_name,
        "spark.driver.memory": memory,
    }
    builder = SparkSession.builder.config(map=_with_defaults(settings | dict(config or {})))
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise UnavailableError(_start_failure()) from None


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with defaults for Spark's address, web UI and sockets."""
    usual = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    # The workers of a remote master do not have the directory.
    if str(settings["spark.master"]).startswith("local"):
        usual |= _socket_settings()
    return usual | dict(settings)


def _socket_settings() -> dict[str, str]:
    """Return the settings for Unix domain sockets between Java and Python.

    They cost less than TCP. Spark's default directory for them is shared by all users, and Spark
    leaves old sockets in it.
    """
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_SOCKET_DIRECTORY - len(
        "/ziplog-spark-12345678"
    ):
        return {}
    return {_USE_UNIX_SOCKETS: "true", _SOCKET_DIRECTORY: _socket_directory()}


@functools.cache
def _socket_directory() -> str:
    """Create a directory that only this user can read; it is deleted when this process ends."""
    path = tempfile.mkdtemp(prefix="ziplog-spark-")
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: str, owner: int) -> None:
    """Remove a directory of this process; a forked child does nothing."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def register_view(
    spark: SparkSession, name: str, bootstrap: str | None = None, **options: Any
) -> DataFrame:
    """Register a temporary view of the log or a range: `spark.sql("SELECT ... FROM name")`.

    The end of the range is fixed when the view is registered; register it again for later records.

    Args:
        spark: the session.
        name: the name of the view; a view with this name is replaced.
        bootstrap: "host:port,...", nodes of the membership service; None: `options` has the
            servers or a `path`.
        options: those of docs/spark.md, section 1.1: `startingOffsets="earliest"`.

    Returns:
        The DataFrame behind the view.

    Raises:
        pyspark.errors.AnalysisException: an option is not allowed, or the log cannot be reached.

    """
    if bootstrap is not None:
        options["ziplog.bootstrap.servers"] = bootstrap
    rows = spark.read.format("ziplog").options(**options).load()
    rows.createOrReplaceTempView(name)
    return rows


def _find_java() -> str:
    """Return the path of the `java` that Spark will run; the search is Spark's own."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise UnavailableError(
                f"Spark needs Java 17 or later. JAVA_HOME is {home!r}, but {java} does not exist: "
                f"{_INSTALL}, and set JAVA_HOME to its directory"
            )
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise UnavailableError(
            "Spark needs Java 17 or later. JAVA_HOME is not set, and PATH contains no java "
            f"({os.environ.get('PATH', '')!r}): {_INSTALL}, or set JAVA_HOME to its directory"
        )
    return found


def _start_failure() -> str:
    """Return the probable reason why Spark did not start."""
    try:
        java = _find_java()
    except UnavailableError as error:
        return str(error)
    try:
        done = subprocess.run(  # noqa: S603  Spark has just run it
            [java, "-version"], check=False, capture_output=True, text=True, timeout=_VERSION_S
        )
        version = (done.stderr or done.stdout).partition("\n")[0] or "version unknown"
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    return (
        f"Spark did not start with {java} ({version}). It needs Java 17 or later: {_INSTALL}, or "
        "set JAVA_HOME to another Java. Spark's own messages are above"
    )
