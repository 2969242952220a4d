"""Changes of the cluster file of a running cluster, and the command that applies them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from ziplog.cli import app

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from ziplog.local import Cluster


def rewrite(cluster: Cluster, **values: object) -> Path:
    """Change keys of the cluster file, which has each of them once."""
    path = cluster.config.data_dir / "cluster.toml"
    lines = path.read_text().splitlines()
    for name, value in values.items():
        (index,) = [at for at, line in enumerate(lines) if line.startswith(f"{name} =")]
        lines[index] = f"{name} = {json.dumps(value)}"
    path.write_text("\n".join(lines) + "\n")
    return path


def reload(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["config", "reload", str(path), *options])
