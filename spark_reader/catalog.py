"""A Spark session that finds its Java and its Python, and views of the log (docs/spark.md)."""

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

#: Where Spark starts without asking for java here: a Spark of its own, or one that runs.
_EXTERNAL_SPARK: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT")
#: `java -version` takes a fraction of it.
_VERSION_S: Final = 20.0
#: How Spark's Java and its Python processes talk; by files, where.
_USE_UNIX_SOCKETS: Final = "spark.python.unix.domain.socket.enabled"
_SOCKET_DIRECTORY: Final = "spark.python.unix.domain.socket.dir"
#: The longest name of a directory of sockets: Spark's names there have 43 bytes, all may have 103.
_MAX_SOCKET_DIRECTORY: Final = 60
_INSTALL: Final = "install it (apt install openjdk-17-jre-headless)"


def session(
    app_name: str = "ziplog",
    cores: int | None = None,
    memory: str = "2g",
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """Return a Spark session in this process, or the one that runs already, as it is.

    Its workers run this very Python, unless PYSPARK_PYTHON says otherwise, and are talked to by
    sockets in a directory of this user's only; it listens on loopback only; there is no web page.

    Args:
        app_name: its name.
        cores: how many tasks run at once, from 1; None: as many as the machine has cores.
        memory: of the Java process, as Java writes it: "512m", "2g".
        config: more of Spark's settings by name; they come before those above.

    Raises:
        ConfigError: cores are less than 1.
        UnavailableError: pyspark is not installed, or there is no Java, or it does not start
            Spark; says what was looked for, and what to install.

    """
    if cores is not None and cores < 1:
        raise ConfigError("cores", cores, "1 or more, or None")
    require("Spark", "pyspark", "pyarrow")
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
    """Return settings, and those that were not given: how Spark is reached, and reaches Python."""
    usual = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    # Elsewhere that directory is not there.
    if str(settings["spark.master"]).startswith("local"):
        usual |= _socket_settings()
    return usual | dict(settings)


def _socket_settings() -> dict[str, str]:
    """Return the settings with which Python is talked to by sockets that are files.

    They cost less than those of TCP. Spark's own place for them is the one that all users share,
    and it leaves some there.
    """
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_SOCKET_DIRECTORY - len(
        "/ziplog-spark-12345678"
    ):
        return {}
    return {_USE_UNIX_SOCKETS: "true", _SOCKET_DIRECTORY: _socket_directory()}


@functools.cache
def _socket_directory() -> str:
    """Make a directory that only this user may look into, until this process ends."""
    path = tempfile.mkdtemp(prefix="ziplog-spark-")
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: str, owner: int) -> None:
    """Remove a directory of this process; a forked child leaves it to its parent."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def register_view(
    spark: SparkSession, name: str, bootstrap: str | None = None, **options: Any
) -> DataFrame:
    """Make the log, or a range of it, a temporary view: `spark.sql("SELECT ... FROM name")`.

    Its end is pinned when it is made; make it again to see what came since.

    Args:
        spark: the session.
        name: the view's; one of that name is replaced.
        bootstrap: "host:port,...", nodes of the membership service; None: it is in `options`, or
            the option `path` is.
        options: those of docs/spark.md, section 1.1: `startingOffsets="earliest"`.

    Returns:
        What the view shows.

    Raises:
        pyspark.errors.AnalysisException: an option is not allowed, or the log is not there.

    """
    if bootstrap is not None:
        options["ziplog.bootstrap.servers"] = bootstrap
    rows = spark.read.format("ziplog").options(**options).load()
    rows.createOrReplaceTempView(name)
    return rows


def _find_java() -> str:
    """Return the java that Spark will run, found as Spark finds it."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise UnavailableError(
                f"Spark needs Java 17 or later, and JAVA_HOME is {home!r}, but there is no {java}: "
                f"{_INSTALL}, and set JAVA_HOME to its directory"
            )
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise UnavailableError(
            "Spark needs Java 17 or later, and JAVA_HOME is not set, and no java is in PATH "
            f"({os.environ.get('PATH', '')!r}): {_INSTALL}, or set JAVA_HOME to its directory"
        )
    return found


def _start_failure() -> str:
    """Return why Spark did not start, as far as one can see from here."""
    try:
        java = _find_java()
    except UnavailableError as error:
        return str(error)
    try:
        done = subprocess.run(  # noqa: S603  Spark has just run it
            [java, "-version"], check=False, capture_output=True, text=True, timeout=_VERSION_S
        )
        version = (done.stderr or done.stdout).partition("\n")[0] or "it does not say which"
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    return (
        f"Spark did not start with {java} ({version}); it needs Java 17 or later: {_INSTALL}, or "
        "set JAVA_HOME to another; what Spark said is above"
    )
