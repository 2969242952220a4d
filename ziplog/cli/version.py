"""`ziplog version`: what this command is."""

from __future__ import annotations

import platform
import sys

import ziplog
from ziplog.cli.options import Json, versions_text
from ziplog.cli.terminal import print_json
from ziplog.version import FILES
from ziplog.wire.node_info import VERSIONS


def version(*, json: Json = False) -> None:
    """Print the versions of this command, of the wire (first and last), of files, and of Python.

    `ziplog status` has the versions of a cluster's nodes.
    """
    if json:
        document = {
            "version": ziplog.__version__,
            "wire_versions": list(VERSIONS),
            "files": FILES,
            "python": platform.python_version(),
        }
        print_json(document)
    else:
        sys.stdout.write(f"{versions_text()}\n")
