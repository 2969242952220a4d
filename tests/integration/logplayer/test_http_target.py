"""HTTP targets, with an endpoint on loopback: requests, answers, and lost connections."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.server
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from logplayer import targets
from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets.http_target import HttpTarget
from tests.unit.logplayer.targets.databases import batch, record, task
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logplayer.contract import Target

ID = f"{7:032x}/orders/warehouse"


class Endpoint(http.server.ThreadingHTTPServer):
    """An endpoint that records requests; answers are chosen by the test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook?a=1"
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        #: Status, headers and body of the next answers; None: the connection is cut.
        self.answers: list[tuple[int, dict[str, str], bytes] | None] = []

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append((status, named, body))


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection to the endpoint."""

    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        answer = self.server.answers.pop(0) if self.server.answers else (200, {}, b"")
        if answer is None:
            self.close_connection = True
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" in headers:
            self.close_connection = True  # The body is cut.
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_POST  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def made(endpoint: Endpoint) -> Iterator[Any]:
    """Return a function that makes and opens targets of the endpoint."""
    opened: list[HttpTarget] = []

    def make(**more: Any) -> HttpTarget:
        target = targets.http("warehouse", endpoint.url, **more).connect()
        assert isinstance(target, HttpTarget)
        opened.append(target)
        if more.get("position") == "endpoint":
            endpoint.answer(200, b'{"position": 1}')
        target.open(task())
        endpoint.requests.clear()
        return target

    yield make
    for target in opened:
        target.close()


def test_batch_is_one_request(endpoint: Endpoint, made: Any) -> None:
    one, two = record(1, "grün".encode()), record(2, b"\xff", None)
    made(batch_records=10).deliver(batch(task(), 1, 4, [one, two]))
    ((method, path, headers, body),) = endpoint.requests
    assert (method, path) == ("POST", "/hook?a=1")
    assert headers["Content-Type"] == "application/json"
    assert (headers["Ziplog-Term"], headers["Ziplog-Position"]) == ("1", "1")
    assert "Idempotency-Key" not in headers
    assert json.loads(body) == {
        "player": "orders", "target": "warehouse", "partition": 0, "term": 1, "start": 1,
        "stop": 4, "records": [
            {"id": f"{ID}/1", "gsn": 1, "shard": 1, "epoch": 0,
             "timestamp": one.timestamp.isoformat(), "key": "k", "payload": "grün"},
            {"id": f"{ID}/2", "gsn": 2, "shard": 0, "epoch": 0,
             "timestamp": two.timestamp.isoformat(), "key": None, "payload_b64": "/w=="},
        ],
    }  # fmt: skip


def test_single_record_has_an_idempotency_key(endpoint: Endpoint, made: Any) -> None:
    target = made()
    target.deliver(batch(task(), 5, 6))
    target.deliver(batch(task(), 6, 8))  # no record in it
    assert [sent[2]["Idempotency-Key"] for sent in endpoint.requests] == [f"{ID}/5"]


def test_records_that_a_map_made_of_one_have_different_ids(endpoint: Endpoint, made: Any) -> None:
    made().deliver(batch(task(), 5, 9, [record(5), record(5), record(8)]))
    sent = json.loads(endpoint.requests[0][3])["records"]
    assert [one["id"] for one in sent] == [f"{ID}/5", f"{ID}/5.1", f"{ID}/8"]


def test_requests_are_signed_and_have_given_headers(endpoint: Endpoint, made: Any) -> None:
    made(secret="key", headers={"Authorization": "Bearer x"}).deliver(batch(task(), 1, 4))
    ((_, _, headers, body),) = endpoint.requests
    assert headers["Authorization"] == "Bearer x"
    at, signature = headers["Ziplog-Signature"].split(",")
    at = at.removeprefix("t=")
    expected = hmac.new(b"key", f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    assert signature == f"v1={expected}"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
def test_temporary_answers_are_reasons_to_retry(endpoint: Endpoint, made: Any, status: int) -> None:
    endpoint.answer(status, b"not\nnow", Retry_After="7")
    with pytest.raises(Retry, match=rf"the endpoint answers {status} .*: not now") as caught:
        made().deliver(batch(task(), 1, 4))
    assert caught.value.after_s == 7


def test_date_of_retry_after_is_ignored(endpoint: Endpoint, made: Any) -> None:
    endpoint.answer(503, Retry_After="Fri, 31 Dec 1999 23:59:59 GMT")
    with pytest.raises(Retry) as caught:
        made().deliver(batch(task(), 1, 4))
    assert caught.value.after_s is None


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refusals_reject_the_batch(endpoint: Endpoint, made: Any, status: int) -> None:
    endpoint.answer(status)
    with pytest.raises(Rejected, match=str(status)):
        made().deliver(batch(task(), 1, 4))


@pytest.mark.parametrize("status", [102, 103, 301, 307, 401, 403, 404, 405, 410])
def test_answers_about_the_configuration_stop_the_task(
    endpoint: Endpoint, made: Any, status: int
) -> None:
    endpoint.answer(status)
    with pytest.raises(ConfigError, match=f"{status}.*check url, headers and secret"):
        made().deliver(batch(task(), 1, 4))


def test_kept_connection_that_was_closed_is_replaced(endpoint: Endpoint, made: Any) -> None:
    target = made()
    target.deliver(batch(task(), 1, 2))
    endpoint.answers.append(None)
    target.deliver(batch(task(), 2, 4))
    assert [json.loads(sent[3])["start"] for sent in endpoint.requests] == [1, 2, 2]


def test_lost_answer_is_a_reason_to_retry(endpoint: Endpoint, made: Any) -> None:
    endpoint.answers.append(None)
    target = made()
    with pytest.raises(Retry, match="cannot reach 127"):
        target.deliver(batch(task(), 1, 2))
    target.deliver(batch(task(), 1, 2))


def test_slow_endpoint_is_a_reason_to_retry() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        target = targets.http("warehouse", url, timeout_s=0.05).connect()
        target.open(task())
        with pytest.raises(Retry, match="no answer from 127"):
            target.deliver(batch(task(), 1, 2))


@pytest.mark.parametrize(
    "part", [b"x", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["bytes", "without an end"]
)
def test_answer_that_does_not_end_is_a_reason_to_retry(part: bytes) -> None:
    is_over = threading.Event()

    def answer() -> None:
        connection, _ = trickling.accept()
        with connection, contextlib.suppress(OSError):
            while not is_over.wait(0.02):
                connection.send(part)

    with socket.create_server(("127.0.0.1", 0)) as trickling:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{trickling.getsockname()[1]}/"
        target = targets.http("warehouse", url, timeout_s=0.2).connect()
        target.open(task())
        found: list[Exception] = []
        delivery = threading.Thread(target=keep_error, args=(target, found), daemon=True)
        delivery.start()
        delivery.join(20)
        is_over.set()
        thread.join()
    assert [str(error).partition(" 127")[0] for error in found] == ["no answer from"]


def keep_error(target: Target, found: list[Exception]) -> None:
    """Deliver a batch, and keep the error."""
    try:
        target.deliver(batch(task(), 1, 2))
    except Retry as error:
        found.append(error)


def test_check_connects_and_sends_nothing(endpoint: Endpoint) -> None:
    target = targets.http("warehouse", endpoint.url).connect()
    assert isinstance(target, HttpTarget)
    target.check()
    assert endpoint.requests == []
    absent = targets.http("warehouse", "http://127.0.0.1:1/").connect()
    assert isinstance(absent, HttpTarget)
    with pytest.raises(UnavailableError, match=r"cannot connect to 127\.0\.0\.1:1:"):
        absent.check()


# --- an endpoint that stores positions ---


def test_endpoint_is_asked_for_its_position(endpoint: Endpoint, made: Any) -> None:
    target = made(position="endpoint")
    endpoint.answer(200, b'{"position": 8, "more": 1}')
    assert target.open(task(2, position=5, has_moved=True)) == Opened(8)
    ((method, path, _, body),) = endpoint.requests
    assert (method, path) == (
        "PUT", "/hook?a=1&player=orders&target=warehouse&partition=0"
    )  # fmt: skip
    assert json.loads(body) == {
        "cluster": f"{7:032x}", "birth": 1, "partitions": 1, "term": 2, "seek": 0, "position": 5,
        "fresh": False,
    }  # fmt: skip


def test_endpoint_gets_steps_without_records(endpoint: Endpoint, made: Any) -> None:
    made(position="endpoint").deliver(batch(task(), 6, 8))
    assert json.loads(endpoint.requests[0][3])["records"] == []


def test_endpoint_refuses_other_terms_and_positions(endpoint: Endpoint, made: Any) -> None:
    target = made(position="endpoint")
    endpoint.answer(409, b"term 3")
    with pytest.raises(Fenced, match="position 1: 409 Conflict: term 3"):
        target.deliver(batch(task(), 1, 4))
    endpoint.answer(409)
    with pytest.raises(Fenced, match="term 1"):
        target.open(task())


def test_batch_of_unknown_outcome_is_not_sent_again(endpoint: Endpoint, made: Any) -> None:
    target = made(position="endpoint")
    target.deliver(batch(task(), 1, 2))
    endpoint.answers.append(None)
    with pytest.raises(Retry):
        target.deliver(batch(task(), 2, 4))
    assert len(endpoint.requests) == 2


def test_endpoint_without_the_position_stops_the_task(endpoint: Endpoint, made: Any) -> None:
    target = made(position="endpoint")
    endpoint.answer(404)
    with pytest.raises(ConfigError, match=r"moved to 5.*seek orders/warehouse/0 genesis"):
        target.open(task(2, position=5, has_moved=True))
    endpoint.answer(200, b"ok")
    with pytest.raises(ConfigError, match="answer to PUT has no position"):
        target.open(task(2))
    endpoint.answer(503)
    with pytest.raises(Retry):
        target.open(task(2))


def test_cut_answer_of_an_endpoint_is_a_reason_to_retry(endpoint: Endpoint, made: Any) -> None:
    target = made(position="endpoint")
    endpoint.answer(200, b'{"posi', Content_Length="15")
    with pytest.raises(Retry, match="within its answer to PUT"):
        target.open(task(2))
    endpoint.answer(200, b'{"position": 8}')
    assert target.open(task(2)) == Opened(8)


# --- bad input ---


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "ftp://x/"}, {"url": "http://"}, {"url": "http://user:pass@x/"}, {"url": 5},
        {"url": "http://x/#a"}, {"url": "http://x:0/"}, {"url": "http://x:99999/"},
        {"url": "http://a..b/"}, {"url": "http://x/a b"}, {"url": "http://x/\n"}, {"url": "http://[x/"},
        {"position": "here"}, {"secret": ""}, {"secret": 5}, {"timeout_s": 0},
        {"timeout_s": True}, {"timeout_s": float("nan")}, {"headers": {"a b": "x"}},
        {"headers": {"a": "x\r\ny: z"}}, {"headers": {"a": 5}}, {"headers": 5},
        {"headers": {"Content-Type": "text/plain"}}, {"headers": {"ziplog-term": "5"}},
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^target shop: ") as caught:
        targets.http("shop", arguments.pop("url", "http://x/"), **arguments)
    assert "user:pass" not in str(caught.value)


def test_defaults_suit_endpoints_of_single_records() -> None:
    spec = targets.http("shop", "http://x/")
    assert (spec.batch_records, spec.stores_position, spec.keeps_rejected) == (1, False, False)
    assert targets.http("shop", "https://x/", position="endpoint").stores_position
