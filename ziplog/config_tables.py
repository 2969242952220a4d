"""The tables of the cluster file that are not about nodes: `[log]`, `[monitor]` and `[limits]`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Final

from ziplog.config_keys import Key, check_fields
from ziplog.errors import ConfigError

HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
HOST_RULE: Final = "a host name or an IPv4 address"
_MIB: Final = 1024 * 1024
_TIB: Final = 1024 * 1024 * _MIB


@dataclass(frozen=True)
class LogConfig:
    """What processes write to their logs, and how much of it is kept."""

    level: Annotated[
        str,
        Key(
            "Least level of the lines that are written.",
            str,
            choices=("debug", "info", "warning", "error"),
            change="reload",
        ),
    ] = "info"
    format: Annotated[
        str,
        Key(
            "logfmt: key=value. json: one object a line.",
            str,
            choices=("logfmt", "json"),
            change="reload",
        ),
    ] = "logfmt"
    file_bytes: Annotated[
        int,
        Key(
            "Size at which `ziplog up` starts a new file in logs/.",
            int,
            low=65_536,
            high=4096 * _MIB,
            unit="bytes",
            change="reload",
        ),
    ] = 16 * _MIB
    files: Annotated[
        int,
        Key(
            "Number of files that `ziplog up` keeps for each node.",
            int,
            low=1,
            high=100,
            change="reload",
        ),
    ] = 4

    def __post_init__(self) -> None:
        """Refuse values that no log can have."""
        check_fields(self, " in [log]")


@dataclass(frozen=True)
class MonitorConfig:
    """Where `ziplog up` serves the monitor's HTTP, and for which clients."""

    host: Annotated[
        str,
        Key(
            "The address that the monitor binds.",
            str,
            pattern=HOST,
            rule=HOST_RULE,
            change="reload",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Key("The monitor's port; 0: no monitor.", int, high=65535, change="reload")
    ] = 7480
    token_file: Annotated[
        str | None,
        Key(
            "A file whose content clients must send as a bearer token; required outside loopback."
            " A relative path starts at the cluster file.",
            str,
            pattern=re.compile(r"[^\0]+"),
            rule="the path of a file",
            change="reload",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse values that no monitor can have."""
        check_fields(self, " in [monitor]")
        if self.token_file is None and not is_loopback(self.host):
            raise ConfigError(
                "token_file in [monitor]",
                None,
                "given",
                message="token_file in [monitor] is required, because its host"
                f" {self.host!r} is not a loopback address",
            )


@dataclass(frozen=True)
class LimitsConfig:
    """How fast each client may insert."""

    inserts_per_s: Annotated[
        int,
        Key(
            "Records that a client may insert a second, at each shard; 0: no limit.",
            int,
            high=10**9,
            unit="records/s",
            change="reload",
        ),
    ] = 0
    insert_bytes_per_s: Annotated[
        int,
        Key(
            "Bytes that a client may insert a second, at each shard; 0: no limit.",
            int,
            high=_TIB,
            unit="bytes/s",
            change="reload",
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Refuse values that no limit can have."""
        check_fields(self, " in [limits]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
