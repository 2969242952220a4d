"""Targets at HTTP endpoints: a POST for each batch, in order, over one kept connection.

position="none": at least once; a record has the same id in each request. position="endpoint":
exactly once, if the endpoint stores term and position with the effect, and refuses (409) a batch
whose term or start differs from what it stores. docs/player.md has the requests.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import re
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, get_args
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import msgspec

from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets.settings import check_timeout
from ziplog.cli.rendering import add_bytes
from ziplog.errors import ConfigError, UnavailableError
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from logplayer.contract import Batch, Task
    from ziplog.types import Record

#: Where the position is: only in the cursor, or also at the endpoint.
Position = Literal["none", "endpoint"]
POSITIONS: Final[tuple[Position, ...]] = get_args(Position)
#: Maximum size of an answer that is read, in bytes.
_MAX_ANSWER: Final = 65_536
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*", re.ASCII)
#: Headers that the target sets; also those with names that start with "ziplog-".
_OWN_HEADERS: Final = {"content-length", "content-type", "idempotency-key", "transfer-encoding"}
_URL_RULE: Final = "an http:// or https:// URL without a user, a password and a fragment"
#: These mean: try again later. 409: the endpoint works on the same key.
_LATER: Final = {408, 409, 425, 429}
#: These are a matter of the configuration, not of a record.
_CONFIGURATION: Final = {401, 403, 404, 405, 410}


class Endpoint(NamedTuple):
    """Where and how batches are sent."""

    url: SplitResult
    position: Position
    secret: bytes
    headers: Mapping[str, str]
    timeout_s: float


class _Answer(NamedTuple):
    status: int
    reason: str
    retry_after: str | None
    body: bytes
    #: The connection ended before the end of the body.
    is_cut: bool


class _Position(msgspec.Struct):
    """The answer of an endpoint that stores positions."""

    position: int


class _TimedReader(io.RawIOBase):
    """Reads a socket until a deadline: its own time limit counts from byte to byte."""

    def __init__(self, sock: Any, timeout_s: float) -> None:
        self._socket: Final = sock
        self._raw: Final = sock.makefile("rb", buffering=0)
        self._deadline: Final = time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("its answer did not end in time")
        self._socket.settimeout(left_s)
        found: int | None = self._raw.readinto(buffer)
        return found

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """An answer that ends within the time limit of its connection."""

    def __init__(self, sock: Any, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock, sock.gettimeout()))


class HttpTarget:
    """One task's connection to an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint: Final = endpoint
        self._stores: Final = endpoint.position == "endpoint"
        self._connection: http.client.HTTPConnection | None = None

    def open(self, task: Task) -> Opened:
        """Have the endpoint store the task's term, if it stores positions.

        Raises:
            Retry: the endpoint cannot be reached, or asks for a later attempt.
            Fenced: it has a later term.
            ConfigError: it has no position although the cursor moved, or refuses the request.

        """
        if not self._stores:
            return Opened()
        body = msgspec.json.encode({
            "cluster": cluster_id(task.cluster), "birth": task.birth, "partitions": task.partitions,
            "term": task.term, "seek": task.seek, "position": task.position,
            "fresh": not task.has_moved,
        })  # fmt: skip
        query = urlencode({
            "player": task.player, "target": task.target, "partition": task.partition
        })  # fmt: skip
        answer = self._request("PUT", query, body, task)
        if answer.status == http.client.NOT_FOUND and task.has_moved:
            problem = (
                f"the endpoint has no position of {task.cursor} since its last seek, and the cursor"
                f" has moved to {task.position}. To send everything: `ziplog cursor seek"
                f" {task.cursor} genesis`; to go on from a position, seek there"
            )
            raise ConfigError("position", None, "present", message=problem)
        if answer.status == http.client.CONFLICT:
            raise Fenced(f"the endpoint refuses term {task.term}: {_shown(answer)}")
        if not _is_success(answer):
            _fail(answer)
        if answer.is_cut:
            raise Retry(f"{self._host()} ended the connection within its answer to PUT")
        try:
            return Opened(msgspec.json.decode(answer.body, type=_Position).position)
        except msgspec.DecodeError as error:
            problem = f"the endpoint's answer to PUT has no position: {error}"
            raise ConfigError("position", None, "a number", message=problem) from error

    def deliver(self, batch: Batch) -> None:
        """Send a batch.

        Raises:
            Retry: the endpoint cannot be reached, did not answer, or asks for a later attempt.
            Rejected: it refuses the batch for good.
            Fenced: it stores another term or position.
            ConfigError: it refuses the request for a reason of the configuration.

        """
        if not batch.records and not self._stores:
            return
        answer = self._request("POST", "", _body(batch), batch.task, _headers(batch))
        if _is_success(answer):
            return
        if answer.status == http.client.CONFLICT and self._stores:
            raise Fenced(f"the endpoint refuses position {batch.start}: {_shown(answer)}")
        if not batch.records and answer.status not in _LATER and answer.status < 500:
            problem = f"the endpoint refuses an empty batch: {_shown(answer)}"
            raise ConfigError("endpoint", answer.status, "200", message=problem)
        _fail(answer)

    def check(self) -> None:
        """Connect, and send nothing.

        Raises:
            UnavailableError: the endpoint cannot be reached.

        """
        try:
            self._connected().connect()
        except OSError as error:
            raise UnavailableError(f"cannot connect to {self._host()}: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _request(
        self,
        method: str,
        query: str,
        body: bytes,
        task: Task,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        sent = {
            "Content-Type": "application/json",
            "Ziplog-Term": str(task.term),
            **self._endpoint.headers,
            **(headers or {}),
            **self._signature(body),
        }
        is_kept = self._connection is not None
        try:
            return self._send(method, query, body, sent)
        except (OSError, http.client.HTTPException) as error:
            # A server may close a kept connection at any time. What changes nothing if it is
            # repeated is sent once more; what may have been done is not.
            if not is_kept or (self._stores and method == "POST"):
                raise self._failure(error) from error
        try:
            return self._send(method, query, body, sent)
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from error

    def _send(self, method: str, query: str, body: bytes, headers: Mapping[str, str]) -> _Answer:
        connection = self._connected()
        if connection.sock is not None:
            connection.sock.settimeout(self._endpoint.timeout_s)  # The last answer has changed it.
        try:
            connection.request(method, self._path(query), body, headers)
            response = connection.getresponse()
            content = response.read(_MAX_ANSWER)
            is_cut = bool(response.length) and len(content) < _MAX_ANSWER
            if is_cut or response.read(1):
                self.close()
        except BaseException:
            self.close()
            raise
        if response.will_close:
            self.close()
        later = response.getheader("Retry-After")
        return _Answer(response.status, response.reason, later, content, is_cut)

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            url, timeout_s = self._endpoint.url, self._endpoint.timeout_s
            assert url.hostname is not None
            if url.scheme == "https":
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(
                    url.hostname, url.port, timeout=timeout_s, context=context
                )
            else:
                self._connection = http.client.HTTPConnection(
                    url.hostname, url.port, timeout=timeout_s
                )
            self._connection.response_class = _TimedResponse
        return self._connection

    def _path(self, query: str) -> str:
        url = self._endpoint.url
        joined = "&".join(part for part in (url.query, query) if part)
        path = quote(url.path or "/", safe="/%:@!$&'()*+,;=~-._")
        return f"{path}?{joined}" if joined else path

    def _signature(self, body: bytes) -> dict[str, str]:
        if not self._endpoint.secret:
            return {}
        now = str(int(time.time()))
        signed = hmac.new(self._endpoint.secret, f"{now}.".encode() + body, hashlib.sha256)
        return {"Ziplog-Signature": f"t={now},v1={signed.hexdigest()}"}

    def _failure(self, error: Exception) -> Retry:
        kind = "no answer from" if isinstance(error, TimeoutError) else "cannot reach"
        return Retry(f"{kind} {self._host()}: {error or type(error).__name__}")

    def _host(self) -> str:
        return self._endpoint.url.netloc


def connector(
    where: str,
    url: str,
    *,
    position: Position,
    secret: str | bytes | None,
    headers: Mapping[str, str] | None,
    timeout_s: float,
) -> Callable[[], HttpTarget]:
    """Return how tasks connect to an endpoint.

    Raises:
        ConfigError: an argument is invalid.

    """
    if position not in POSITIONS:
        raise ConfigError("position", position, " or ".join(map(repr, POSITIONS)), where)
    if secret is not None and not (isinstance(secret, (str, bytes)) and secret):
        raise ConfigError("secret", "(not shown)", "a text, or left out", where)
    check_timeout(timeout_s, where)
    key = secret.encode() if isinstance(secret, str) else secret or b""
    found = Endpoint(_url(url, where), position, key, _checked(headers or {}, where), timeout_s)
    return lambda: HttpTarget(found)


def _url(url: str, where: str) -> SplitResult:
    try:
        found = urlsplit(url) if isinstance(url, str) else None
        is_valid = (
            found is not None
            and found.scheme in {"http", "https"}
            and bool(found.hostname and found.hostname.encode("idna"))
            and found.username is None
            and not found.fragment
            and (found.port is None or found.port > 0)
            and _HEADER_VALUE.fullmatch(url) is not None
            and " " not in url
        )
    except ValueError:
        found, is_valid = None, False
    if not is_valid or found is None:
        raise ConfigError("url", "(not shown)", _URL_RULE, where)
    return found


def _checked(headers: Mapping[str, str], where: str) -> dict[str, str]:
    """Return headers; a value may be a password, so no error has it."""
    try:
        found = dict(headers)
    except (TypeError, ValueError):
        raise ConfigError("headers", "(not shown)", "a table of names and texts", where) from None
    for name, value in found.items():
        is_name = isinstance(name, str) and _HEADER_NAME.fullmatch(name) is not None
        if not is_name or name.lower() in _OWN_HEADERS or name.lower().startswith("ziplog-"):
            allowed = "the name of an HTTP header that the target does not set itself"
            raise ConfigError("a name in headers", name, allowed, where)
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            allowed = "a text of printable ASCII characters"
            raise ConfigError(f"the header {name}", "(not shown)", allowed, where)
    return found


def _body(batch: Batch) -> bytes:
    task = batch.task
    return msgspec.json.encode({
        "player": task.player, "target": task.target, "partition": task.partition,
        "term": task.term, "start": batch.start, "stop": batch.stop,
        "records": list(_records(batch)),
    })  # fmt: skip


def _records(batch: Batch) -> Iterator[dict[str, Any]]:
    for record, name in zip(batch.records, _ids(batch.task, batch.records), strict=True):
        fields = {
            "id": name, "gsn": record.rid.gsn, "shard": record.rid.shard, "epoch": record.epoch,
            "timestamp": record.timestamp.isoformat(),
        }  # fmt: skip
        add_bytes(fields, "key", record.key)
        add_bytes(fields, "payload", record.payload)
        yield fields


def _ids(task: Task, records: Sequence[Record]) -> Iterator[str]:
    """Yield the id of each record: the same one in each request, whichever process sends it."""
    before, number = -1, 0
    for record in records:
        gsn = record.rid.gsn
        number = number + 1 if gsn == before else 0
        before = gsn
        further = f".{number}" if number else ""  # what `map` made of one record
        yield f"{cluster_id(task.cluster)}/{task.player}/{task.target}/{gsn}{further}"


def _headers(batch: Batch) -> dict[str, str]:
    headers = {"Ziplog-Position": str(batch.start)}
    if len(batch.records) == 1:
        (headers["Idempotency-Key"],) = _ids(batch.task, batch.records)
    return headers


def _is_success(answer: _Answer) -> bool:
    return 200 <= answer.status < 300


def _shown(answer: _Answer) -> str:
    """Return an answer in one line."""
    text = " ".join(answer.body[:200].decode(errors="replace").split())
    return f"{answer.status} {answer.reason}" + (f": {text}" if text else "")


def _fail(answer: _Answer) -> NoReturn:
    """Raise what an answer means that is not a success."""
    status = answer.status
    if status in _LATER or status >= 500:
        raise Retry(f"the endpoint answers {_shown(answer)}", _seconds(answer.retry_after))
    if status in _CONFIGURATION or status < 400:
        problem = f"the endpoint answers {_shown(answer)}; check url, headers and secret"
        raise ConfigError("endpoint", status, "200", message=problem)
    raise Rejected(f"the endpoint answers {_shown(answer)}")


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of Retry-After; a date, which clocks may disagree about, is ignored."""
    if retry_after is None or not re.fullmatch(r"\d{1,9}", retry_after.strip(), re.ASCII):
        return None
    return float(retry_after)
