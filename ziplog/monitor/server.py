"""The monitor's HTTP server: /metrics, /status, /healthz and /readyz, from the last snapshot.

Rules: GET and HEAD only; at most 32 connections, 8 KiB of head, 5 s a request. A snapshot is at
most a second old while the cluster replies at once; `age_ms` gives its age.
"""

from __future__ import annotations

import hmac
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from ziplog import event_log
from ziplog.core.first_seen import FirstSeen
from ziplog.errors import ZiplogError
from ziplog.monitor import exposition, health, metrics
from ziplog.monitor.cursor_polls import CursorPolls
from ziplog.monitor.nodes import NodePolls, endpoints_of
from ziplog.monitor.status import with_replies
from ziplog.runtime.clock import now_ns
from ziplog.segments.entry import SCARCE

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from ziplog.client.blocking import Log
    from ziplog.wire import Metrics

_INTERVAL_S: Final = 1.0
#: Time limit of one reading: a service that is far away, or busy, may take over a second.
_CALL_S: Final = 4.0
#: Age of a snapshot above which the cluster counts as silent.
_MAX_AGE_S: Final = 5.0
_MAX_CONNECTIONS: Final = 32
_MAX_HEAD_BYTES: Final = 8_192
_REQUEST_S: Final = 5.0
#: Time without accepting connections after the system refused one.
_REFUSED_S: Final = 0.1
_JSON: Final = "application/json"


class Snapshots:
    """Reads the status document, the nodes' metrics and the cursors, in three threads."""

    def __init__(
        self,
        log: Log,
        coordinators: Sequence[str] = (),
        is_asked: Callable[[str], bool] | None = None,
    ) -> None:
        """Prepare to read.

        Args:
            log: a client of the cluster.
            coordinators: endpoints of LogDB's coordinators to ask, too.
            is_asked: whether to ask the node at an endpoint for its metrics; None: all nodes.

        """
        self._log: Final = log
        self._coordinators: Final = coordinators
        self._is_asked: Final = is_asked
        self._times: Final = FirstSeen()
        self._polls: Final = NodePolls(self._endpoints)
        self._cursors: Final = CursorPolls(log, lambda: self.document)
        self._document: dict[str, Any] | None = None
        self._taken_at = time.monotonic() - _MAX_AGE_S
        self.error = "the cluster has not replied yet"
        self._stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> None:
        """Start to read."""
        self._thread.start()
        self._polls.start()
        self._cursors.start()

    def stop(self) -> None:
        """Stop to read."""
        self._stopped.set()
        self._cursors.stop()
        self._polls.stop()
        self._thread.join()

    @property
    def age_s(self) -> float:
        """Age of the last snapshot, in seconds."""
        return time.monotonic() - self._taken_at

    @property
    def document(self) -> dict[str, Any] | None:
        """The last status document; None: the cluster has not replied for 5 s."""
        return self._document if self.age_s < _MAX_AGE_S else None

    def node_problem(self, name: str) -> str:
        """Return why a node, or the cluster (""), is not ready; "": it is ready."""
        if name in self._coordinators:
            return health.coordinator_problem(name, self._replies().get(name))
        document = self.document
        return self.error if document is None else health.readiness_problem(document, name)

    def metrics(self, media_type: str) -> str:
        """Return all metrics in the format of a media type."""
        found = metrics.families(
            self.document, self._replies(), self._cursors.cursors(), self._times, now_ns()
        )
        return exposition.render(found, media_type)

    def status(self) -> dict[str, Any] | None:
        """Return the last status document, with what the nodes replied; None: as `document`."""
        document = self.document
        return None if document is None else with_replies(document, self._replies())

    def silence_s(self, name: str) -> float | None:
        """Return the time since a node replied; None: there is no such node."""
        return self._polls.silence_s(name)

    def _replies(self) -> dict[str, Metrics | None]:
        return {
            name: reply.metrics if reply is not None else None
            for name, reply in self._polls.replies().items()
        }

    def _endpoints(self) -> dict[str, str]:
        """Return the endpoints of the nodes to ask, and of coordinators."""
        document, is_asked = self._document, self._is_asked
        nodes = endpoints_of(document) if document is not None else {}
        if is_asked is not None:
            nodes = {name: endpoint for name, endpoint in nodes.items() if is_asked(endpoint)}
        return nodes | {endpoint: endpoint for endpoint in self._coordinators}

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._document = document = self._log.cluster(timeout=_CALL_S)
                self._times.observe(document["epoch"], now_ns())
                self._taken_at = time.monotonic()
            except ZiplogError as error:
                self.error = str(error)
            self._stopped.wait(_INTERVAL_S)


class Monitor(ThreadingHTTPServer):
    """Serves the snapshots of one cluster."""

    daemon_threads = True

    def __init__(self, host: str, port: int, snapshots: Snapshots, token: str = "") -> None:
        """Listen.

        Args:
            host: the address to listen at.
            port: the port; 0: any free one.
            snapshots: what it serves.
            token: clients must send it as a bearer token; "": none is needed.

        Raises:
            OSError: the system refuses the address or the port.

        """
        self.snapshots: Final = snapshots
        self.token = token
        #: The open connections, and when each was accepted.
        self._accepted_at: Final[dict[Any, float]] = {}
        super().__init__((host, port), _Handler)

    @property
    def endpoint(self) -> str:
        """Where it listens, "host:port"."""
        return f"{self.server_address[0]!s}:{self.server_address[1]}"

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; pause if the system refuses it: it stays in the queue."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in SCARCE:
                time.sleep(_REFUSED_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless there are too many."""
        if len(self._accepted_at) >= _MAX_CONNECTIONS:
            self.close_request(request)
            return
        self._accepted_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget and close a connection."""
        self._accepted_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End requests that take too long; called twice a second."""
        now = time.monotonic()
        for request, accepted_at in list(self._accepted_at.items()):
            if now - accepted_at > _REQUEST_S:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log an error of the monitor's own; after one of the connection, the client has gone."""
        if not isinstance(sys.exception(), OSError):
            event_log.exception("a request to the monitor failed")


def _end(request: socket.socket) -> None:
    try:
        request.shutdown(2)
    except OSError:  # It has ended.
        return


class _Head:
    """The request's head, of limited size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file
        self._left = _MAX_HEAD_BYTES

    @property
    def is_too_long(self) -> bool:
        """Whether the head is longer than allowed."""
        return self._left < 0

    def readline(self, _size: int = -1) -> bytes:
        """Return the next line; empty, as at the end, once the head is too long."""
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        return b"" if self.is_too_long else line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: Monitor
    timeout = _REQUEST_S

    def setup(self) -> None:
        super().setup()
        self._head = _Head(self.rfile)  # type: ignore[arg-type]
        self.rfile = self._head  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def _serve(self) -> None:
        if self._head.is_too_long:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if not self._is_authorized():
            self._reply(HTTPStatus.UNAUTHORIZED, "text/plain", b"a bearer token is needed\n")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:  # A bracket that opens no IPv6 address.
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        node = parse_qs(url.query).get("node", [""])[0]
        snapshots = self.server.snapshots
        match url.path:
            case "/metrics":
                kind = exposition.media_type(self.headers.get("Accept", ""))
                self._reply(HTTPStatus.OK, kind, snapshots.metrics(kind).encode())
            case "/status":
                self._reply_status(snapshots.status())
            case "/healthz":
                problem = health.liveness_problem(node, snapshots.silence_s(node)) if node else ""
                check = f"{node} replies" if node else "the monitor replies"
                self._reply_health(problem, [check])
            case "/readyz":
                self._reply_health(snapshots.node_problem(node))
            case _:
                paths = b"paths: /metrics /status /healthz /readyz\n"
                self._reply(HTTPStatus.NOT_FOUND, "text/plain", paths)

    def _is_authorized(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return not self.server.token or hmac.compare_digest(
            given, f"Bearer {self.server.token}".encode()
        )

    def _reply_status(self, document: dict[str, Any] | None) -> None:
        snapshots = self.server.snapshots
        if document is None:
            self._reply_health(snapshots.error)
            return
        body = document | {"age_ms": int(snapshots.age_s * 1000)}
        self._reply(HTTPStatus.OK, _JSON, msgspec.json.encode(body))

    def _reply_health(self, problem: str, checks: Sequence[str] = ()) -> None:
        code = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        status = "failed" if problem else "ok"
        body: dict[str, Any] = {"status": status}
        if problem:
            body["reason"] = problem
        if checks:
            body["checks"] = [{"check": check, "status": status} for check in checks]
        self._reply(code, _JSON, msgspec.json.encode(body))

    def _reply(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, *_: str | None, **__: str | None) -> None:
        """Reply to a bad request; other methods than GET and HEAD are not allowed."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._reply(status, "text/plain", f"{status.phrase.lower()}\n".encode())

    def version_string(self) -> str:
        """Return the name of the server."""
        return "ziplog"

    def log_message(self, *_: object) -> None:
        """Log nothing for a request."""
