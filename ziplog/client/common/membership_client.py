"""Questions to the membership service: asked of its leader, again until answered.

A question goes to the node that is thought to lead; `NotLeader` names another one; silence for a
while sends it to all. The same request number is kept, so that an answer to any copy counts.
Invariant: nothing is sent when no question is open. See docs/protocol.md, sections 3 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.core.message import Message
from ziplog.core.node import Broadcast
from ziplog.wire import (
    ChangeShard,
    ClusterInfo,
    Hello,
    LeaseHistory,
    LeaseQuery,
    ShardChanged,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.step_context import Turn
    from ziplog.wire import NotLeader

_MS: Final = 1_000_000
#: A question without an answer is asked again, of all nodes, after so long (doubling each time).
_FIRST_RETRY_NS: Final = 100 * _MS
_LAST_RETRY_NS: Final = 1_000 * _MS
_REPLIES: Final[dict[type[Message], type[Message]]] = {
    Hello: ClusterInfo,
    LeaseQuery: LeaseHistory,
    StatusQuery: StatusReply,
    Trim: TrimReply,
    ChangeShard: ShardChanged,
}
#: More endpoints than that are not remembered.
_MAX_ENDPOINTS: Final = 16


class Question(msgspec.Struct):
    """Something that was asked and is not answered."""

    message: Message
    answer: Callable[[Any], None]
    retry_at: int
    pause: int = _FIRST_RETRY_NS
    #: Who was asked since `retry_at` was set.
    asked: set[bytes] = msgspec.field(default_factory=set)


class Service:
    """The membership service, as a client sees it."""

    def __init__(self, turn: Turn, endpoints: Sequence[str]) -> None:
        self._turn: Final = turn
        #: Where the service may be; those that the user gave first.
        self.endpoints: Final = list(endpoints)
        #: The cluster's number; 0 while it is not known.
        self.cluster = 0
        self._names: dict[str, bytes] = {}
        self._leader: bytes | None = None
        self._questions: dict[int, Question] = {}

    @property
    def known(self) -> list[str]:
        """All endpoints that are known, those that the user gave first."""
        return list(dict.fromkeys((*self.endpoints, *self._names)))

    def learn(self, endpoints: Sequence[str]) -> None:
        """Take the service's endpoints, the leader's first."""
        for endpoint in reversed(endpoints):
            self._leader = self._name(endpoint)

    def _name(self, endpoint: str) -> bytes:
        name = self._names.get(endpoint)
        if name is None:
            name = self._turn.connect(endpoint)
            if len(self._names) < _MAX_ENDPOINTS:
                self._names[endpoint] = name
        return name

    def ask(self, build: Callable[[int, int], Message], answer: Callable[[Any], None]) -> int:
        """Ask `build(cluster, request)` and return the request; `answer` gets the reply."""
        turn = self._turn
        request = turn.request()
        message = build(self.cluster, request)
        question = Question(message, answer, turn.now + _FIRST_RETRY_NS)
        self._questions[request] = question
        turn.wake_at(question.retry_at)
        if self._leader is None:
            self._ask_all(question)
        else:
            question.asked.add(self._leader)
            turn.send(self._leader, message)
        return request

    def is_open(self, request: int) -> bool:
        """Whether a question was asked and is not answered."""
        return request in self._questions

    def forget(self, request: int) -> None:
        """Stop asking."""
        self._questions.pop(request, None)

    def answered(self, reply: Any) -> None:
        """Take a reply; nothing happens if it was not asked for (any more)."""
        request: int = reply.request
        question = self._questions.get(request)
        if question is None:
            return
        if type(reply) is not _REPLIES[type(question.message)]:
            self._turn.counters.protocol_errors += 1
            return
        del self._questions[request]
        question.answer(reply)

    def not_leader(self, reply: NotLeader) -> None:
        """Go on to the leader that a node named."""
        question = self._questions.get(reply.request)
        if question is None or not reply.leader:
            return
        leader = self._name(reply.leader)
        if leader not in question.asked:
            self._leader = leader
            question.asked.add(leader)
            self._turn.send(leader, question.message)

    def _ask_all(self, question: Question) -> None:
        for endpoint in self.endpoints:
            self._name(endpoint)
        question.asked.update(self._names.values())
        self._turn.effects.append(Broadcast(tuple(self._names.values()), question.message))

    def tick(self) -> None:
        """Ask again what is due."""
        turn = self._turn
        for question in self._questions.values():
            if turn.now >= question.retry_at:
                question.pause = min(question.pause * 2, _LAST_RETRY_NS)
                question.retry_at = turn.now + question.pause
                question.asked.clear()
                self._ask_all(question)
            turn.wake_at(question.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for question in self._questions.values():
            assert self._turn.alarm <= question.retry_at, "a question would be forgotten"
