"""The tables of SQL targets, and the statements on them.

Their parameters are `?` in order; `statement.positional` returns the driver's notation.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: The tables; a row of ziplog_position belongs to one cursor of one cluster. A record that is
#: rejected again after a seek has a further row in ziplog_dead.
TABLES: Final = {
    "ziplog_position": """
CREATE TABLE IF NOT EXISTS ziplog_position (
  player VARCHAR(48) NOT NULL, target VARCHAR(48) NOT NULL, part INTEGER NOT NULL,
  parts INTEGER NOT NULL, cluster BIGINT NOT NULL, birth BIGINT NOT NULL, term BIGINT NOT NULL,
  seek BIGINT NOT NULL, position BIGINT NOT NULL, PRIMARY KEY (player, target, part))""",
    "ziplog_dead": """
CREATE TABLE IF NOT EXISTS ziplog_dead (
  player VARCHAR(48) NOT NULL, target VARCHAR(48) NOT NULL, gsn BIGINT NOT NULL,
  shard INTEGER NOT NULL, {key} {blob}, payload {blob}, timestamp_us BIGINT NOT NULL,
  why TEXT NOT NULL)""",
}
#: The table of a target without a statement.
RECORDS: Final = """
CREATE TABLE IF NOT EXISTS records (
  gsn BIGINT NOT NULL PRIMARY KEY, shard INTEGER NOT NULL, epoch BIGINT NOT NULL,
  timestamp_us BIGINT NOT NULL, {key} {blob}, payload {blob} NOT NULL)"""
INSERT_RECORD: Final = (
    "INSERT INTO records (gsn, shard, epoch, timestamp_us, {key}, payload)"
    " VALUES (:gsn, :shard, :epoch, :timestamp_us, :key, :payload)"
)
# MySQL assigns from left to right, so `seek` is last.
FENCE: Final = (
    "UPDATE ziplog_position SET position = CASE WHEN seek < ? THEN ? ELSE position END,"
    " term = ?, seek = ? WHERE player = ? AND target = ? AND part = ?"
    " AND parts = ? AND cluster = ? AND birth = ? AND term <= ? AND seek >= ?"
)
STORED: Final = (
    "SELECT parts, cluster, birth, term, seek, position FROM ziplog_position"
    " WHERE player = ? AND target = ? AND part = ?"
)
OTHER_PARTS: Final = (
    "SELECT parts FROM ziplog_position WHERE player = ? AND target = ? AND parts <> ?"
)
CREATE: Final = (
    "INSERT INTO ziplog_position (player, target, part, parts, cluster, birth, term, seek,"
    " position) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
MOVE: Final = (
    "UPDATE ziplog_position SET position = ?"
    " WHERE player = ? AND target = ? AND part = ? AND term = ? AND position = ?"
)
KEEP: Final = (
    "INSERT INTO ziplog_dead (player, target, gsn, shard, {key}, payload, timestamp_us, why)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
#: A commit ends it, so its release fails if `apply` has committed.
SAVEPOINT: Final = "SAVEPOINT ziplog_apply"
RELEASE: Final = "RELEASE SAVEPOINT ziplog_apply"
#: A row that no task has, to test a connection with.
PROBE: Final = ("-", "-", 0, 0, 0, 0, 0, 0, 0)
MOVE_PROBE: Final = "UPDATE ziplog_position SET position = position + 1 WHERE player = ?"
FIND_PROBE: Final = "SELECT term FROM ziplog_position WHERE player = ?"
DELETE_PROBE: Final = "DELETE FROM ziplog_position WHERE player = ?"


class PositionRow(NamedTuple):
    """A task's row of ziplog_position."""

    parts: int
    cluster: int
    birth: int
    term: int
    seek: int
    position: int
