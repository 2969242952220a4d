"""Requests to archives in the background: every request gets a reply."""

from __future__ import annotations

import threading

import pytest

from ziplog.client.engines import archive_requests
from ziplog.client.engines.archive_requests import ArchiveRequests
from ziplog.core.node import AskArchive
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import UnavailableError


@pytest.fixture
def request_() -> AskArchive:
    """A request to an archive that does not run."""
    (port,) = free_ports(1, "127.0.0.1")
    return AskArchive(7, "127.0.0.1", port, 1, 0, 21)


def test_archive_that_does_not_run_has_no_table(request_: AskArchive) -> None:
    woken = threading.Event()
    requests = ArchiveRequests(woken.set)
    requests.start(request_)
    assert woken.wait(10)
    (reply,) = requests.replies
    assert (reply.number, reply.table) == (7, None)


def test_lack_of_threads_is_a_reply_without_a_table(
    request_: AskArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UnavailableError("no thread")

    monkeypatch.setattr(archive_requests, "start_thread", refuse)
    woken = threading.Event()
    requests = ArchiveRequests(woken.set)
    requests.start(request_)
    assert woken.is_set()
    assert requests.replies[0].table is None
