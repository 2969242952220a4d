"""Rebuild of a lost membership service, from the directories of a stopped cluster.

    directories -> holdings (shard, failure_handler) -> plan (mms) -> new directories

Other machines write their holdings to files, which replace their directories here.

Rules: nothing is written before all checks. The new directories are complete and on stable storage
before the first of them gets its name; until all have it, `UNFINISHED` is present
(docs/protocol.md, section 16).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.core.holdings import HandlerHoldings, Holdings, RebuildPlan, ServerHoldings
from ziplog.deploy.supervisor import Supervisor, has_files
from ziplog.errors import ConfigError, UnavailableError
from ziplog.raft.offline import found_group
from ziplog.runtime.child_processes import environment, python
from ziplog.segments.durable_files import replace_contents, sync_directory
from ziplog.segments.identity import IDENTITY_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ziplog.config import ClusterConfig

#: The start of a file with `Holdings`.
_MAGIC: Final = b"ziplog holdings 1\n"
#: The directory of a rebuild that was not finished.
UNFINISHED: Final = "membership-rebuild.unfinished"


class MembershipRebuild:
    """One rebuild: plan it, show the plan, then write it. Locks the cluster's directory."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory of a stopped cluster.

        Raises:
            ConfigError: there is no valid cluster file.
            UnavailableError: a supervisor runs the cluster.

        """
        self._supervisor: Final = Supervisor(directory)
        self.config: Final[ClusterConfig] = self._supervisor.config

    def close(self) -> None:
        """Release the lock."""
        self._supervisor.stop()

    def plan(self, lost: Sequence[str] = (), files: Sequence[Path] = ()) -> RebuildPlan:
        """Read all directories that are here; return the state that is to be written.

        Args:
            lost: the names of the storage servers whose directories are lost for good.
            files: what `save_holdings` wrote on other machines.

        Raises:
            ConfigError: a lost server is not in the cluster file, or is not lost; a file is not
                valid, or has a node that is also here.
            UnavailableError: the membership service is not lost; a server's directory is missing,
                in use, damaged, or of another cluster; a former rebuild was not finished.

        """
        self._check_is_lost()
        for name in lost:
            self.config.shard_of(name)
            if (self.config.data_dir / name).exists():
                raise ConfigError("--lost", name, "a server whose directory is not here")
        holdings = self._read()
        for file in files:
            _add(holdings, file)
        if given := {one.node for one in holdings.servers} & set(lost):
            raise ConfigError("--lost", min(given), "a server that no --holdings file has")
        if not holdings.servers:
            raise UnavailableError(
                f"no directory of a storage server is in {self.config.data_dir}: put them back"
            )
        holdings.lost.extend(lost)
        found = self._run("mms", "--rebuild", given=msgspec.msgpack.encode(holdings))
        return msgspec.msgpack.decode(found, type=RebuildPlan)

    def save_holdings(self, file: Path) -> list[str]:
        """Write what the directories here hold to a new file; return the names of their nodes.

        Raises:
            UnavailableError: there is no directory of a node, or one is in use or damaged.
            OSError: the file exists, or cannot be written.

        """
        holdings = self._read()
        names = _nodes(holdings)
        if not names:
            raise UnavailableError(
                f"no directory of a storage server or failure handler is in {self.config.data_dir}"
            )
        file.touch(mode=0o600, exist_ok=False)
        try:
            replace_contents(file, _MAGIC + msgspec.msgpack.encode(holdings))
        except OSError as error:
            file.unlink(missing_ok=True)
            error.filename = str(file)
            raise
        return names

    def _read(self) -> Holdings:
        """Return what the directories here hold."""
        config = self.config
        servers = [node.name for shard in config.shards for node in shard.replicas]
        handlers = [node.name for node in config.failure_handlers]
        return Holdings(
            [
                self._holdings("shard", name, ServerHoldings)
                for name in servers
                if (config.data_dir / name / IDENTITY_FILE).exists()
            ],
            [
                self._holdings("failure_handler", name, HandlerHoldings)
                for name in handlers
                if (config.data_dir / name / "journal").exists()
            ],
            [],
        )

    def write(self, plan: RebuildPlan) -> list[Path]:
        """Write the directories of all membership nodes; return them.

        Raises:
            OSError: they cannot be written; those that have their name are complete.
            JournalError: likewise.

        """
        data_dir, nodes = self.config.data_dir, self.config.mms
        unfinished = data_dir / UNFINISHED
        unfinished.mkdir(mode=0o700)
        endpoints = {node.raft_endpoint: unfinished / node.name for node in nodes}
        number = time.time_ns() // 1000
        try:
            found_group(endpoints, plan.state, number)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_directory(data_dir)
        for node in nodes:
            (unfinished / node.name).rename(data_dir / node.name)
        sync_directory(data_dir)
        unfinished.rmdir()
        return [data_dir / node.name for node in nodes]

    def _check_is_lost(self) -> None:
        data_dir, nodes = self.config.data_dir, self.config.mms
        unfinished = data_dir / UNFINISHED
        here = [node.name for node in nodes if has_files(data_dir / node.name)]
        if 2 * len(here) > len(nodes):
            raise UnavailableError(
                f"the membership service is not lost: {', '.join(here)} in {data_dir} is a majority"
                " of its nodes. Run `ziplog up`; if it does not start because these directories are"
                " new, move them away and run this command again"
            )
        if unfinished.exists():
            written = ", ".join(here) or "no other"
            raise UnavailableError(
                f"a former rebuild was interrupted: remove {unfinished} and the directories that it"
                f" wrote ({written}), and run this command again"
            )
        if here:
            raise UnavailableError(
                f"the directory of {', '.join(here)} is still in {data_dir}: a rebuild replaces all"
                " membership nodes. Move it away first"
            )

    def _holdings(self, module: str, name: str, kind: type[Any]) -> Any:
        return msgspec.msgpack.decode(self._run(module, "--node", name, "--holdings"), type=kind)

    def _run(self, module: str, *arguments: str, given: bytes = b"") -> bytes:
        command = python(module, "--config", str(self._supervisor.path), *arguments)
        done = subprocess.run(  # noqa: S603 - our own module
            command, input=given, capture_output=True, env=environment(), check=False
        )
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip()
            raise UnavailableError(text.rpartition("\n")[2] or f"{module} failed")
        return done.stdout


def _nodes(holdings: Holdings) -> list[str]:
    servers = [one.node for one in holdings.servers]
    return servers + [one.node for one in holdings.handlers]


def _add(holdings: Holdings, file: Path) -> None:
    """Add the contents of a file that `save_holdings` wrote."""
    content = file.read_bytes()
    try:
        found = msgspec.msgpack.decode(content.removeprefix(_MAGIC), type=Holdings)
    except msgspec.DecodeError:
        found = None
    if found is None or not content.startswith(_MAGIC):
        raise ConfigError("--holdings", str(file), "a file of `ziplog membership holdings`")
    if twice := sorted(set(_nodes(found)) & set(_nodes(holdings))):
        sentence = f"{file} has {', '.join(twice)}, and so has this directory or another file"
        raise ConfigError("--holdings", str(file), "of other nodes", message=sentence)
    holdings.servers.extend(found.servers)
    holdings.handlers.extend(found.handlers)
