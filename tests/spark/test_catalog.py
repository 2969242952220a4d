"""Spark sessions without Java or packages: a one-line error says what is missing and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reader import catalog, optional_dependencies
from spark_reader.catalog import session
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BY_FILES = "spark.python.unix.domain.socket.enabled"
DIRECTORY = "spark.python.unix.domain.socket.dir"

ASK = """
from spark_reader.catalog import session
from ziplog.errors import UnavailableError
try:
    session("test", 1)
except UnavailableError as error:
    print(error)
"""


def reported(**environment: str) -> str:
    """Return the output of a process that requests a session in this environment."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK", "PYSPARK")) and name != "JAVA_HOME"
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        check=True, capture_output=True, text=True, env=mine | environment,
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    return line


def test_a_java_home_without_java_is_named() -> None:
    line = reported(JAVA_HOME="/nonexistent")
    assert "JAVA_HOME is '/nonexistent', but /nonexistent/bin/java does not exist" in line
    assert "Java 17 or later" in line
    assert "openjdk-17-jre-headless" in line


def test_without_java_home_the_path_that_was_searched_is_named(tmp_path: Path) -> None:
    line = reported(PATH=str(tmp_path))
    assert f"JAVA_HOME is not set, and PATH contains no java ('{tmp_path}')" in line
    assert "openjdk-17-jre-headless" in line
    assert "PATH contains no java ('')" in reported(PATH="")


def test_a_java_that_does_not_start_spark_is_named_with_its_version(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\nexit 1\n")
    java.chmod(0o755)
    line = reported(JAVA_HOME=str(tmp_path))
    assert f'Spark did not start with {java} (openjdk version "11.0.2")' in line
    assert "It needs Java 17 or later" in line


def test_missing_packages_are_reported_with_the_command_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = {"pyspark"}
    monkeypatch.setattr(
        optional_dependencies, "find_spec", lambda name: None if name in absent else object()
    )
    with pytest.raises(UnavailableError, match=r"needs pyspark, .* pip install 'ziplog\[spark\]'"):
        session("test", 1)
    absent |= {"pyarrow"}
    with pytest.raises(UnavailableError, match="needs pyspark and pyarrow, "):
        session("test", 1)


def test_zero_cores_are_refused_before_java_starts() -> None:
    with pytest.raises(ConfigError, match="cores is 0; it must be 1 or more, or None"):
        session("test", 0)


@pytest.mark.timeout(300)
def test_python_is_reached_over_private_unix_sockets(spark: SparkSession) -> None:
    from pyspark.sql.functions import udf  # noqa: PLC0415 - may be missing

    reported = udf(lambda _: os.environ["PYTHON_WORKER_FACTORY_SOCK_DIR"], "string", useArrow=False)
    (row,) = spark.range(1).select(reported("id").alias("directory")).collect()
    directory = Path(row.directory)
    assert str(directory) == spark.sparkContext.getConf().get(DIRECTORY)
    assert list(directory.glob(".*.sock"))
    assert directory.stat().st_mode & 0o777 == 0o700


def test_user_settings_override_the_defaults() -> None:
    local = {"spark.master": "local[2]"}
    assert catalog._with_defaults(local)[BY_FILES] == "true"
    chosen = {BY_FILES: "false", "spark.driver.host": "10.0.0.1"}
    assert catalog._with_defaults(local | chosen).items() >= chosen.items()


def test_remote_masters_and_long_paths_use_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BY_FILES not in catalog._with_defaults({"spark.master": "spark://far:7077"})
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long" * 10)
    assert BY_FILES not in catalog._with_defaults({"spark.master": "local[2]"})


def test_the_socket_directory_is_removed_at_exit() -> None:
    ask = (
        "from spark_reader import catalog as c; d = c._socket_directory(); "
        "assert d == c._socket_directory(); "
    )
    done = subprocess.run(
        [sys.executable, "-c", ask + "print(d)"], check=True, capture_output=True, text=True
    )
    assert not Path(done.stdout.strip()).exists()
