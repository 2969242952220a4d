"""One shard, its failure handler and its readers, as states and steps: docs/spec/Shard.tla.

The steps and invariants are those of the specification, under the same names; README.md beside it
says what they stand for. A state is a flat tuple of small integers: each part (a server, a queue of
forwards, the control state, what readers were told) is kept once in a table and named by its
number. What a step does to one part depends on that part and few others, so it is worked out once
and remembered: a search is mostly dictionary look-ups.

Invariant: a part that can play no role any more (a dead server's memory, a letter to nobody) has
one fixed value, so that it does not tell states apart.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tests.model.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
State = tuple[int, ...]
#: What happens, for people: its name, who takes it, and details.
Step = tuple[Any, ...]
Slots = tuple[int, ...]

#: What is in a slot: nothing, a no-op, or record number r as r + 2.
NONE: Final = 0
NOOP: Final = 1
PRIMARY: Final = 0
INVARIANTS: Final = (
    "AckedStays",
    "DelivAgree",
    "StableAgree",
    "ViewAgree",
    "NoDup",
    "NoHole",
    "DecidedStays",
    "NoGap",
)


class Bounds(NamedTuple):
    """How large the model is."""

    records: int = 2
    #: Of this shard, in both epochs; epoch 1 is the first `epoch` of them.
    positions: int = 3
    epoch: int = 2
    servers: int = 2
    #: The highest number of a view; one less than this many attempts to recover.
    views: int = 2
    crashes: int = 1
    #: Whether a subscriber merges with another shard, which owns one position before our second.
    merge: bool = False


class Server(NamedTuple):
    """What one server holds."""

    slots: Slots
    #: Bit g: what is in slot g was decided, not guessed.
    decided: int = 0
    is_alive: bool = True
    #: The recovery that it promised to store nothing more to; 0: none.
    frozen: int = 0
    view: int = 1
    #: Bit r: record r came from its client, in this view.
    seen: int = 0
    stable: int = 0


class Control(NamedTuple):
    """What consensus holds, and what the failure handler's leader remembers."""

    view: int = 1
    #: The newest recovery; under way while it is above `view`.
    attempt: int = 1
    candidate: int | None = None
    confirmed: int = 1
    finished: int = 1
    #: What `view` begins with, and the survivor; None once everybody is in it.
    decision: tuple[Slots, int] | None = None
    #: The view to which epoch 2 was granted; 0: to none yet.
    grant: int = 0
    crashes: int = 0
    #: The leader's memory: the state of the candidate.
    answer: Slots | None = None
    #: The view before the decision, for a handler that forgets it ("durable-decision" off).
    base: int = 0


class Message(NamedTuple):
    """A forward: `value` is in the slots first..last."""

    value: int
    first: int
    last: int
    view: int


class Arrival(NamedTuple):
    """What a server does about a record or a time-out."""

    step: Step
    server: int
    ack: int = 0
    message: Message | None = None


class Table(Generic[T]):
    """Values, and a small number for each."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """Return the number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class ShardModel:
    """The model, with some rules switched off."""

    def __init__(
        self,
        bounds: Bounds,
        off: frozenset[str] = frozenset(),
        invariants: tuple[str, ...] = INVARIANTS,
        *,
        symmetry: bool = True,
    ) -> None:
        """Make a model.

        Args:
            bounds: how large it is.
            off: names of the rules that do not hold.
            invariants: names of those to check.
            symmetry: take states that differ in the records' names only for one.

        """
        assert off <= set(RULES), f"no such rule: {off - set(RULES)}"
        assert 1 <= bounds.epoch <= bounds.positions
        self.bounds: Final = bounds
        self._on: Final = {rule: rule not in off for rule in RULES}
        self.servers: Final[Table[Server]] = Table()
        self.queues: Final[Table[tuple[Message, ...]]] = Table()
        self.controls: Final[Table[Control]] = Table()
        self.tolds: Final[Table[Slots]] = Table()
        n = bounds.servers
        self._n: Final = n
        # Where the parts stand in a state: servers, queues of the backups, acks, ...
        self._acks, self._control, self._told, self._merge = range(2 * n - 1, 2 * n + 3)
        self._checks: Final = [(name, getattr(self, f"_check_{name}")) for name in invariants]
        identity, *others = permutations(range(bounds.records))
        self._renamings: Final = others if symmetry else []
        for name in (
            "_arrivals", "_skips", "_forwards", "_appended", "_freeze", "_entered", "_crashed",
            "_with_stable", "_tell", "completed", "_rename_server", "_rename_queue",
            "_rename_acks", "_rename_control", "_rename_told", "_is_told_by",
        ):  # fmt: skip
            setattr(self, name, cache(getattr(self, name)))

    def initial(self) -> State:
        """Return the state before anything happened."""
        server = self.servers.number(Server((NONE,) * self.bounds.positions))
        queue, control = self.queues.number(()), self.controls.number(Control())
        n = self._n
        return (server,) * n + (queue,) * (n - 1) + (0, control, self.tolds.number(()), 0)

    # --- positions ---

    def _last(self, view: int, grant: int) -> int:
        """Return the last position that a view may use; before its first one if it has none."""
        return self.bounds.positions if grant == view else self.bounds.epoch

    def _first(self, view: int) -> int:
        return 1 if view == 1 else self.bounds.epoch + 1

    def _next(self, server: Server, grant: int) -> int:
        """Return the position after all that the server filled in its view."""
        first, last = self._first(server.view), self._last(server.view, grant)
        filled = [g for g in range(first, last + 1) if server.slots[g - 1] != NONE]
        return filled[-1] + 1 if filled else first

    def _settled(self, grant: int) -> int:
        """Return the last position that a recovery settles."""
        return self.bounds.positions if grant and self._on["announced-epochs"] else self.bounds.epoch

    def _ack(self, record: int, server: int, gsn: int, view: int) -> int:
        """Return the bit of an acknowledgement."""
        b = self.bounds
        index = view - 1 if self._on["views"] else 0
        return 1 << (((index * self._n + server) * b.positions + gsn - 1) * b.records + record)

    def completed(self, acks: int) -> tuple[tuple[int, int], ...]:
        """Return (value, position) of what all servers of one view acked."""
        b = self.bounds
        return tuple({
            (record + 2, gsn)
            for view in range(1, b.views + 1)
            for record in range(b.records)
            for gsn in range(1, b.positions + 1)
            if all(acks & self._ack(record, server, gsn, view) for server in range(self._n))
        })  # fmt: skip

    # --- steps of one server ---

    def _arrivals(self, who: int, number: int, grant: int) -> list[Arrival]:
        """Deliver each record that did not come yet: acked where it is, or put into a slot."""
        server = self.servers.values[number]
        found = []
        for record in range(self.bounds.records):
            if server.seen >> record & 1:
                continue
            seen, value = server.seen | 1 << record, record + 2
            if self._on["recognise"] and value in server.slots:
                gsn = server.slots.index(value) + 1
                new = self.servers.number(server._replace(seen=seen))
                ack = self._ack(record, who, gsn, server.view)
                found.append(Arrival(("InsertAgain", who, value, gsn), new, ack))
                continue
            for gsn in self._choices(who, server, grant):
                new = self._put(who, server, value, gsn, gsn)._replace(seen=seen)
                ack = self._ack(record, who, gsn, server.view)
                message = Message(value, gsn, gsn, server.view) if who == PRIMARY else None
                step = ("Insert", who, value, gsn)
                found.append(Arrival(step, self.servers.number(new), ack, message))
        return found

    def _choices(self, who: int, server: Server, grant: int) -> Iterator[int]:
        """Yield the slots that a new record may get."""
        epoch, last = self.bounds.epoch, self._last(server.view, grant)
        gsn = self._next(server, grant)
        if gsn <= last:
            yield gsn
        # A backup goes by its own clock; the primary closes the epoch first.
        if gsn <= epoch < last and (who != PRIMARY or not self._on["token"]):
            yield epoch + 1
        if who == PRIMARY and not self._on["closed-epoch"] and server.view == 1 and gsn > epoch:
            yield from (g for g in range(1, epoch + 1) if server.slots[g - 1] == NOOP)

    def _put(self, who: int, server: Server, value: int, first: int, last: int) -> Server:
        """Put a value into slots; decided, if the primary does it or a backup makes no-ops."""
        slots = list(server.slots)
        slots[first - 1 : last] = [value] * (last - first + 1)
        decided = server.decided
        if who == PRIMARY or value == NOOP:
            decided |= _bits(first, last)
        return server._replace(slots=tuple(slots), decided=decided)

    def _skips(self, who: int, number: int, grant: int) -> list[Arrival]:
        """Decide that all up to some position, or to the end of an epoch, are no-ops."""
        server = self.servers.values[number]
        is_allowed = who == PRIMARY or not self._on["primary-noops"]
        if not is_allowed:
            return []
        first = self._next(server, grant)
        found = []
        for last in range(first, self._last(server.view, grant) + 1):
            new = self.servers.number(self._put(who, server, NOOP, first, last))
            message = Message(NOOP, first, last, server.view) if who == PRIMARY else None
            found.append(Arrival(("Skip", who, first, last), new, 0, message))
        return found

    def _forwards(
        self, who: int, number: int, queue: int, grant: int
    ) -> list[tuple[Step, int, int, int]]:
        """Take the next forward: (step, server, queue, ack)."""
        server, messages = self.servers.values[number], self.queues.values[queue]
        lengths = range(1, len(messages) + 1) if not self._on["gapless-stream"] else (1,)
        found = []
        for length in lengths:
            message = messages[length - 1]
            new, ack = server, 0
            if not self._on["views"] or message.view == server.view:
                new = self._apply(server, message, grant)
                if message.value != NOOP:
                    ack = self._ack(message.value - 2, who, message.first, server.view)
            rest = self.queues.number(messages[length:])
            step = ("Forward", who, *message[:3])
            found.append((step, self.servers.number(new), rest, ack))
        return found

    def _apply(self, server: Server, message: Message, grant: int) -> Server:
        value, first, last, _ = message
        old, slots = server.slots[first - 1], list(server.slots)
        if self._on["remove-copies"] and value != NOOP:
            slots = [NONE if held == value else held for held in slots]
        slots[first - 1 : last] = [value] * (last - first + 1)
        end = self._last(server.view, grant)
        if not self._on["no-reslot"] and old > NOOP and old != value and last + 1 <= end:
            # The displaced record takes the next slot, and pushes what was there one further.
            if last + 2 <= end and slots[last] > NOOP:
                slots[last + 1] = slots[last]
            slots[last] = old
        return server._replace(slots=tuple(slots), decided=server.decided | _bits(first, last))

    def _appended(self, queue: int, message: Message) -> int:
        return self.queues.number((*self.queues.values[queue], message))

    def _held(self, server: Server) -> int:
        """Return up to where the server says that it holds the stream."""
        if self._on["decided-only"]:
            return server.decided.bit_length() - 1 if server.decided else 0
        return max((g for g, held in enumerate(server.slots, 1) if held != NONE), default=0)

    def _with_stable(self, number: int, stable: int) -> int:
        return self.servers.number(self.servers.values[number]._replace(stable=stable))

    def _tell(self, told: int, slots: Slots, frontier: int) -> int:
        """Tell subscribers what lies below a frontier."""
        known = self.tolds.values[told]
        return self.tolds.number(known + slots[len(known) : frontier])

    def _freeze(self, number: int, recovery: int, grant: int) -> tuple[int, Slots]:
        """Return the server after its promise, and the state that it rolls forward to."""
        server = self.servers.values[number]
        limit = self._settled(grant)
        slots = [
            held if held != NONE and (self._on["roll-forward-guesses"] or server.decided >> g & 1)
            else NOOP
            for g, held in enumerate(server.slots[:limit], 1)
        ]  # fmt: skip
        state = (*slots, *(NONE,) * (self.bounds.positions - limit))
        if self._on["freeze"]:
            server = server._replace(frozen=recovery)
        return self.servers.number(server), state

    def _entered(self, number: int, slots: Slots, view: int, grant: int, *, is_told: bool) -> int:
        """Return a server that has taken over what a view begins with."""
        limit = self._settled(grant)
        stable = limit if is_told else self.servers.values[number].stable
        return self.servers.number(Server(slots, _bits(1, limit), view=view, stable=stable))

    def _crashed(self, number: int) -> int:
        """Return a server that lost its memory: what was stable is on its disk."""
        server = self.servers.values[number]
        kept = server.stable
        slots = server.slots[:kept] + (NONE,) * (self.bounds.positions - kept)
        decided = server.decided & _bits(1, kept)
        lost = Server(slots, decided, is_alive=False, view=server.view, stable=kept)
        return self.servers.number(lost)

    # --- steps of the whole ---

    def successors(self, state: State) -> list[tuple[Step, State]]:
        """Return all (step, next state)."""
        control = self.controls.values[state[self._control]]
        servers = [self.servers.values[number] for number in state[: self._n]]
        found: list[tuple[Step, State]] = []
        working = [
            server.is_alive
            and not server.frozen
            and server.view == control.finished
            for server in servers
        ]
        self._replicate(state, servers, working, control.grant, found)
        self._stabilise(state, servers, working, found)
        self._fail(state, servers, control, found)
        self._recover(state, servers, control, found)
        self._read(state, servers, control, found)
        return found

    def _replicate(
        self,
        state: State,
        servers: list[Server],
        working: list[bool],
        grant: int,
        found: list[tuple[Step, State]],
    ) -> None:
        n, acks = self._n, self._acks
        for who in range(n):
            if not working[who]:
                continue
            arrivals = self._arrivals(who, state[who], grant) + self._skips(who, state[who], grant)
            for step, server, ack, message in arrivals:
                new = list(state)
                new[who] = server
                new[acks] |= ack
                if message is not None:
                    for backup in range(1, n):
                        if self._is_reachable(servers[backup], message.view):
                            at = n + backup - 1
                            new[at] = self._appended(state[at], message)
                found.append((step, tuple(new)))
        for backup in range(1, n):
            at = n + backup - 1
            if working[backup] and self.queues.values[state[at]]:
                for step, server, queue, ack in self._forwards(
                    backup, state[backup], state[at], grant
                ):
                    new = list(state)
                    new[backup], new[at] = server, queue
                    new[acks] |= ack
                    found.append((step, tuple(new)))

    def _is_reachable(self, server: Server, view: int) -> bool:
        """Whether it can ever take a forward that is sent now, in `view`."""
        is_of_view = server.view == view or not self._on["views"]
        return server.is_alive and not server.frozen and is_of_view

    def _stabilise(
        self,
        state: State,
        servers: list[Server],
        working: list[bool],
        found: list[tuple[Step, State]],
    ) -> None:
        primary = servers[PRIMARY]
        if all(working) and len({server.view for server in servers}) == 1:
            stable = min(self._held(server) for server in servers)
            if stable > primary.stable:
                found.append((("Report", stable), self._raise(state, PRIMARY, stable)))
        for who in range(1, self._n):
            server = servers[who]
            if (
                working[who]
                and primary.is_alive
                and server.view == primary.view
                and primary.stable > server.stable
            ):
                step = ("Learn", who, primary.stable)
                found.append((step, self._raise(state, who, primary.stable)))

    def _raise(self, state: State, who: int, stable: int) -> State:
        new = list(state)
        new[who] = self._with_stable(state[who], stable)
        new[self._told] = self._tell(
            state[self._told], self.servers.values[state[who]].slots, stable
        )
        return tuple(new)

    def _fail(
        self,
        state: State,
        servers: list[Server],
        control: Control,
        found: list[tuple[Step, State]],
    ) -> None:
        alive = sum(server.is_alive for server in servers)
        for who, server in enumerate(servers):
            if server.is_alive and control.crashes < self.bounds.crashes and alive > 1:
                new = self._with(state, control._replace(crashes=control.crashes + 1))
                new[who] = self._crashed(state[who])
                self._disconnect(new, who)
                found.append((("Crash", who), tuple(new)))
            if (
                not self._on["restart-is-failure"]
                and not server.is_alive
                and server.view == control.view
            ):
                new = list(state)
                new[who] = self.servers.number(server._replace(is_alive=True))
                found.append((("Restart", who), tuple(new)))
        if control.answer is not None:
            new = self._with(state, control._replace(answer=None))
            found.append((("HandlerCrash",), tuple(new)))
        if control.base and control.base < control.view:
            base = control.base
            forgot = Control(base, base, None, base, base, None, control.grant, control.crashes)
            found.append((("HandlerCrash",), tuple(self._with(state, forgot))))

    def _with(self, state: State, control: Control) -> list[int]:
        new = list(state)
        new[self._control] = self.controls.number(control)
        return new

    def _disconnect(self, new: list[int], who: int) -> None:
        """Forget forwards that a backup will never take."""
        if who != PRIMARY:
            new[self._n + who - 1] = self.queues.number(())

    def _recover(
        self,
        state: State,
        servers: list[Server],
        control: Control,
        found: list[tuple[Step, State]],
    ) -> None:
        view, attempt, candidate = control.view, control.attempt, control.candidate
        is_under_way = attempt > view
        for who, server in enumerate(servers):
            if (
                attempt < self.bounds.views
                and server.is_alive
                and (server.view >= control.confirmed or not self._on["no-way-back"])
                and who != candidate
            ):
                begun = control._replace(attempt=attempt + 1, candidate=who, answer=None)
                found.append((("Begin", attempt + 1, who), tuple(self._with(state, begun))))
            if is_under_way and who == candidate and server.is_alive and control.answer is None:
                found.append((("Acquire", who), self._acquire(state, control, who)))
            if (
                not self._on["one-decision"]
                and not is_under_way
                and server.is_alive
                and server.view < view
            ):
                number, slots = self._freeze(state[who], view, control.grant)
                new_list = self._with(state, control._replace(decision=(slots, who)))
                new_list[who] = number
                if self._on["freeze"]:
                    self._disconnect(new_list, who)
                found.append((("DecideAgain", view, who), tuple(new_list)))
            if control.decision is not None and server.view < view and server.frozen <= view:
                survivor = control.decision[1]
                entrant = servers[survivor]
                has_promised = server.frozen == view or not self._on["freeze"]
                if entrant.is_alive and (
                    entrant.view == view if who != survivor else has_promised
                ):
                    found.append((("Enter", view, who), self._enter(state, servers, control, who)))
        if is_under_way and control.answer is not None:
            assert candidate is not None, "an answer of nobody"
            decided = control._replace(
                view=attempt,
                candidate=None,
                confirmed=attempt if self._n <= 2 else control.confirmed,
                decision=(control.answer, candidate),
                answer=None,
                base=0 if self._on["durable-decision"] else view,
            )
            found.append((("Decide", attempt, candidate), tuple(self._with(state, decided))))
        self._conclude(state, servers, control, found)

    def _acquire(self, state: State, control: Control, who: int) -> State:
        number, slots = self._freeze(state[who], control.attempt, control.grant)
        new = self._with(state, control._replace(answer=slots))
        new[who] = number
        if self._on["freeze"]:
            self._disconnect(new, who)
        return tuple(new)

    def _enter(self, state: State, servers: list[Server], control: Control, who: int) -> State:
        assert control.decision is not None, "a view without a beginning"
        slots, view = control.decision[0], control.view
        is_told = control.confirmed == view or not self._on["confirm"]
        is_last = all(server.view == view for other, server in enumerate(servers) if other != who)
        new = self._with(state, control._replace(decision=None)) if is_last else list(state)
        number = self._entered(state[who], slots, view, control.grant, is_told=is_told)
        new[who] = number
        if self._on["views"]:
            self._disconnect(new, who)
        entered = self.servers.values[number]
        new[self._told] = self._tell(state[self._told], entered.slots, entered.stable)
        return tuple(new)

    def _conclude(
        self,
        state: State,
        servers: list[Server],
        control: Control,
        found: list[tuple[Step, State]],
    ) -> None:
        view = control.view
        if control.attempt != view:
            return
        joined = sum(server.view == view for server in servers)
        if control.confirmed < view and joined >= self._n - 1:
            confirmed = control._replace(confirmed=view)
            found.append((("Confirm", view), tuple(self._with(state, confirmed))))
        if control.finished < view and joined == self._n:
            finished = control._replace(finished=view, confirmed=view)
            found.append((("Finish", view), tuple(self._with(state, finished))))
        if control.finished == view and not control.grant and self.bounds.epoch < self.bounds.positions:
            found.append((("Grant", view), tuple(self._with(state, control._replace(grant=view)))))

    def _read(
        self,
        state: State,
        servers: list[Server],
        control: Control,
        found: list[tuple[Step, State]],
    ) -> None:
        told = self.tolds.values[state[self._told]]
        if self._n > 2 and control.confirmed == control.view > 1:
            limit = self._begins_with(control)
            for who, server in enumerate(servers):
                if server.is_alive and server.view == control.view and server.stable < limit:
                    found.append((("Settle", who, limit), self._raise(state, who, limit)))
        if not self._on["stable-reads"]:
            for who, server in enumerate(servers):
                if server.is_alive and (rest := server.slots[len(told) :]) and rest[0] != NONE:
                    found.append((("Subscribe", who), self._and_told(state, rest[0])))
        if not self._on["noop-after-freeze"] and control.attempt > control.view:
            if len(told) < self._settled(control.grant):
                found.append((("DeclareNoop", len(told) + 1), self._and_told(state, NOOP)))
        if self.bounds.merge:
            self._merge_streams(state, len(told), found)

    def _and_told(self, state: State, value: int) -> State:
        new = list(state)
        new[self._told] = self.tolds.number((*self.tolds.values[state[self._told]], value))
        return tuple(new)

    def _merge_streams(
        self, state: State, told: int, found: list[tuple[Step, State]]
    ) -> None:
        """Move the other shard's frontier, or hand out our next position."""
        given, other = divmod(state[self._merge], 2)
        if not other:
            found.append((("OtherMoves",), (*state[:-1], state[-1] + 1)))
        if given < told and (given + 1 < 2 or other or not self._on["least-frontier"]):
            found.append((("HandOut", given + 1), (*state[:-1], state[-1] + 2)))

    # --- invariants ---

    def violated(self, state: State) -> str | None:
        """Return the first invariant that does not hold."""
        for name, check in self._checks:
            if not check(state):
                return name
        return None

    def _current(self, state: State) -> tuple[Control, list[Server]]:
        """Return the servers that are alive in the current view."""
        control = self.controls.values[state[self._control]]
        servers = [self.servers.values[number] for number in state[: self._n]]
        return control, [s for s in servers if s.is_alive and s.view == control.view]

    def _begins_with(self, control: Control) -> int:
        """Return the last position that the current view's recovery settled."""
        b = self.bounds
        return b.positions if 0 < control.grant < control.view else b.epoch

    def _check_AckedStays(self, state: State) -> bool:
        """What all servers of a view acked is in every later view, at its position."""
        done = self.completed(state[self._acks])
        if not done:
            return True
        _, current = self._current(state)
        return all(server.slots[gsn - 1] == value for value, gsn in done for server in current)

    def _check_DelivAgree(self, state: State) -> bool:
        """What a subscriber was told at a position is what everybody is told, and was acked."""
        told = state[self._told]
        known = self.tolds.values[told]
        if not known:
            return True
        for value, gsn in self.completed(state[self._acks]):
            if gsn <= len(known) and known[gsn - 1] != value:
                return False
        view = self.controls.values[state[self._control]].view
        return all(self._is_told_by(number, told, view) for number in state[: self._n])

    def _is_told_by(self, number: int, told: int, view: int) -> bool:
        """Whether a server would tell nothing else."""
        server, known = self.servers.values[number], self.tolds.values[told]
        if not server.is_alive:
            return True
        is_recovered = server.view == view > 1
        may_guess = not self._on["stable-reads"]
        return all(
            held == value
            for gsn, (held, value) in enumerate(zip(server.slots, known, strict=False), 1)
            if gsn <= server.stable or is_recovered or (may_guess and held != NONE)
        )

    def _check_StableAgree(self, state: State) -> bool:
        """What is stable is the same on all servers of a view."""
        servers = [self.servers.values[number] for number in state[: self._n]]
        return all(
            s.slots[: s.stable] == t.slots[: s.stable]
            for s in servers
            if s.stable and s.is_alive
            for t in servers
            if t.is_alive and t.view == s.view
        )

    def _check_ViewAgree(self, state: State) -> bool:
        """A view has one beginning."""
        control, current = self._current(state)
        if control.view == 1:
            return True
        limit = self._begins_with(control)
        return len({server.slots[:limit] for server in current}) <= 1

    def _check_NoDup(self, state: State) -> bool:
        """A record has at most one decided position."""
        for server in self._current(state)[1]:
            slots = [
                held
                for g, held in enumerate(server.slots, 1)
                if held > NOOP and server.decided >> g & 1
            ]
            if len(set(slots)) < len(slots):
                return False
        return True

    def _check_NoHole(self, state: State) -> bool:
        """A frontier never passes a position that is not decided."""
        servers = (self.servers.values[number] for number in state[: self._n])
        return all(NONE not in s.slots[: s.stable] for s in servers if s.is_alive)

    def _check_DecidedStays(self, state: State) -> bool:
        """Within a view, what the primary decided for a position never changes."""
        primary, *backups = (self.servers.values[number] for number in state[: self._n])
        return not primary.is_alive or all(
            mine == its
            for backup in backups
            if backup.is_alive and backup.view == primary.view
            for g, (mine, its) in enumerate(zip(primary.slots, backup.slots, strict=True), 1)
            if primary.decided & backup.decided & 1 << g
        )

    def _check_NoGap(self, state: State) -> bool:
        """A subscriber hands out no position before all that precede it are decided."""
        given, other = divmod(state[self._merge], 2)
        return given < 2 or bool(other)

    # --- symmetry ---

    def canonical(self, state: State) -> State:
        """Return the least of the states that differ in the records' names only."""
        if not self._renamings:
            return state
        return min(state, *(self._renamed(names, state) for names in self._renamings))

    def _renamed(self, names: tuple[int, ...], state: State) -> State:
        n, acks = self._n, self._acks
        return (
            *[self._rename_server(names, number) for number in state[:n]],
            *[self._rename_queue(names, number) for number in state[n:acks]],
            self._rename_acks(names, state[acks]),
            self._rename_control(names, state[self._control]),
            self._rename_told(names, state[self._told]),
            state[self._merge],
        )

    def _rename_slots(self, names: tuple[int, ...], slots: Slots) -> Slots:
        return tuple(held if held <= NOOP else names[held - 2] + 2 for held in slots)

    def _rename_server(self, names: tuple[int, ...], number: int) -> int:
        server = self.servers.values[number]
        seen = sum(1 << names[r] for r in range(len(names)) if server.seen >> r & 1)
        slots = self._rename_slots(names, server.slots)
        return self.servers.number(server._replace(slots=slots, seen=seen))

    def _rename_queue(self, names: tuple[int, ...], number: int) -> int:
        return self.queues.number(
            tuple(
                message._replace(value=self._rename_slots(names, (message.value,))[0])
                for message in self.queues.values[number]
            )
        )

    def _rename_acks(self, names: tuple[int, ...], acks: int) -> int:
        # A record's number is the least significant part of an ack's index.
        renamed, index, count = 0, 0, len(names)
        while acks >> index:
            if acks >> index & 1:
                renamed |= 1 << (index - index % count + names[index % count])
            index += 1
        return renamed

    def _rename_control(self, names: tuple[int, ...], number: int) -> int:
        control = self.controls.values[number]
        if control.answer is not None:
            control = control._replace(answer=self._rename_slots(names, control.answer))
        if control.decision is not None:
            slots, survivor = control.decision
            control = control._replace(decision=(self._rename_slots(names, slots), survivor))
        return self.controls.number(control)

    def _rename_told(self, names: tuple[int, ...], number: int) -> int:
        return self.tolds.number(self._rename_slots(names, self.tolds.values[number]))


def _bits(first: int, last: int) -> int:
    """Return the bits of the positions first..last."""
    return (1 << (last + 1)) - (1 << first) if last >= first else 0
