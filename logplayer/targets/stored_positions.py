"""What is wrong with a position that a target stores, or does not store, for a task's cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.errors import ConfigError
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from logplayer.contract import Task


def check_is_same_cursor(
    where: str, cluster: str, birth: int, partitions: int, task: Task, hint: str
) -> None:
    """Check that a stored position is that of a task's cursor.

    Args:
        where: what stores it: "the database".
        cluster: the id of the cluster whose log it is of.
        birth: the term in which its cursor was created.
        partitions: the number of partitions of its target.
        task: the task.
        hint: what an operator can do about another one's.

    Raises:
        ConfigError: it is another one's; says what differs.

    """
    if cluster != cluster_id(task.cluster):
        problem = (
            f"{where} has the position of {task.cursor} in the cluster {cluster}; the player's"
            f" cluster is {cluster_id(task.cluster)}"
        )
    elif birth != task.birth:
        problem = (
            f"{where} has the position of a former cursor {task.cursor}, created in term {birth};"
            f" the present one was created in term {task.birth}"
        )
    elif partitions != task.partitions:
        raise partitions_error(where, partitions, task)
    else:
        return
    raise ConfigError("position", birth, "this cursor's", message=f"{problem}. {hint}")


def check_has_seek(where: str, seek: int, position: int, task: Task) -> None:
    """Check that a stored position is no older than the last seek of a cursor that moved since.

    The sought position is not known any more, and the cursor's would skip records.

    Args:
        where: what stores it: "the database".
        seek: the number of seeks that it knows.
        position: the stored position.
        task: the task.

    Raises:
        ConfigError: it is older.

    """
    if seek >= task.seek or not task.has_moved:
        return
    problem = (
        f"{where} has the position {position} of {task.cursor} from before the last seek, but the"
        f" cursor has moved to {task.position} since: an older state was put back. To go on from"
        f" there: `ziplog cursor seek {task.cursor} {position}`, or another position"
    )
    raise ConfigError("position", position, "that of the last seek", message=problem)


def partitions_error(where: str, stored: int, task: Task) -> ConfigError:
    """Return the error of a target that has another number of partitions where it is stored."""
    problem = (
        f"the target {task.target} has {task.partitions} partitions, but {stored} in {where};"
        f" the number is fixed. Set {stored}; or pause all of its cursors at one position, and add"
        " a target with another name that starts there"
    )
    return ConfigError("partitions", task.partitions, str(stored), message=problem)


def missing_error(where: str, what: str, task: Task) -> ConfigError:
    """Return the error of a cursor that has moved, although its target stores no position.

    Args:
        where: what should store it: "the database", or a path.
        what: what it is: "the database".
        task: the task.

    """
    problem = (
        f"{where} has no position of {task.cursor}, whose cursor has moved to {task.position}:"
        f" {what} is empty, or another one. To fill it from the beginning:"
        f" `ziplog cursor seek {task.cursor} genesis`; to go on from a position, seek there"
    )
    return ConfigError("position", None, "present", message=problem)
