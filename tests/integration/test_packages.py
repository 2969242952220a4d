"""The wheel and the source distribution: built here, and a cluster from an installed wheel.

Nothing is fetched: the build runs in this environment, and the new one sees its dependencies.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.ports import consecutive_ports

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "ziplog", "mms", "failure_handler", "shard", "logdb", "logplayer", "spark_reader",
    "pyspark_ziplog",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    directory = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(directory)],
        check=False, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel, and our dependencies without this checkout."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    scheme = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    site = Path(scheme["purelib"])
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The path alone, without its .pth files: one of them names this checkout.
    ours = sysconfig.get_path("purelib")
    (site / "dependencies.pth").write_text(f"{ours}\n")
    command = home / "bin" / "ziplog"
    command.write_text(
        f"#!{home}/bin/python\nfrom ziplog.__main__ import main\nimport sys\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return home / "bin"


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(installed / arguments[0]), *arguments[1:]],
        check=False, capture_output=True, text=True, cwd=cwd, env=environment,
    )  # fmt: skip


def test_the_wheel_holds_the_packages_and_their_metadata(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        entry_points = archive.read(points).decode()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert "ziplog = ziplog.__main__:main" in entry_points
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert {"arrow", "postgres", "raft-password", "spark", "tls"} <= extras
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert versions <= set(metadata.get_all("Classifier") or ())
    description = str(metadata.get_payload())
    assert "# Ziplog for Python" in description
    assert "](docs/" not in description
    assert "](ARCHITECTURE.md" not in description


def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")],
        check=False, capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (again,) = (tmp_path / "again").glob("*.whl")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_a_cluster_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    found = run(
        installed, "python", "-c", "import ziplog, shard; print(ziplog.__file__, shard.__file__)",
        cwd=tmp_path,
    )  # fmt: skip
    assert str(ROOT) not in found.stdout.replace(sysconfig.get_path("purelib"), ""), found.stdout
    assert found.stdout.count(str(installed.parent)) == 2
    port = consecutive_ports(6)
    address = ("--bootstrap", f"127.0.0.1:{port}")
    up = run(
        installed, "ziplog", "up", "--data-dir", "c", "--port", f"{port}", "--shards", "1",
        "--detach", "--timeout", "100", cwd=tmp_path,
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    try:
        rid = run(installed, "ziplog", "insert", "hello", *address, cwd=tmp_path).stdout.strip()
        shown = run(installed, "ziplog", "tail", *address, cwd=tmp_path)
        assert (shown.stdout, shown.stderr) == (f"{rid}\thello\n", "")
        exported = run(installed, "ziplog", "export", "-o", "x.jsonl", *address, cwd=tmp_path)
        assert exported.returncode == 0, exported.stderr
        assert (tmp_path / "x.jsonl").read_text().count("\n") == 1
    finally:
        assert run(installed, "ziplog", "down", "--data-dir", "c", cwd=tmp_path).returncode == 0
