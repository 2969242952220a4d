"""The identity file of a storage server's directory: the server it belongs to, with a checksum.

Rule: a file that differs in any byte from what was written is refused. Files of earlier releases
have no checksum and are accepted; the server adds one at its next start.
"""

from __future__ import annotations

from typing import Final

import msgspec
from crc32c import crc32c

#: Its name in the directory.
IDENTITY_FILE: Final = "identity.json"


class Identity(msgspec.Struct, frozen=True):
    """The server that a data directory belongs to."""

    cluster: str
    node: str
    #: Random, created with the directory; unique.
    server: str


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    cluster: str
    node: str
    server: str
    #: CRC32C of the other fields as JSON, in hexadecimal; "": an earlier release wrote the file.
    checksum: str = ""


def encode_identity(identity: Identity) -> bytes:
    """Return the contents of the file."""
    checksum = f"{crc32c(msgspec.json.encode(identity)):08x}"
    stored = _Stored(identity.cluster, identity.node, identity.server, checksum)
    return msgspec.json.encode(stored) + b"\n"


def decode_identity(contents: bytes) -> tuple[Identity, bool]:
    """Return the identity in the file, and whether the file has a checksum.

    Raises:
        ValueError: the file is damaged; the text describes the damage.

    """
    try:
        stored = msgspec.json.decode(contents, type=_Stored)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    identity = Identity(stored.cluster, stored.node, stored.server)
    if contents == encode_identity(identity):
        return identity, True
    if stored.checksum:
        raise ValueError("its checksum is wrong")
    return identity, False
