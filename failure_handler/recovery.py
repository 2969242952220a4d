"""The recovery of one shard, by the leader of the failure handler.

    failure -> Begin -> Remove -> Freeze -> Decide -> ViewDecided -> Reinsert -> Finish

`advance` compares committed state and recent reports, and takes the next step. So a new leader, a
lost message or a duplicate needs no rule of its own. Rule: each step is repeated until its effect
is seen. Invariant: the fields belong to the newest attempt and the current view only; they may be
lost at any time.

See docs/protocol.md, section 11 (T 4.2.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from failure_handler.candidate_selection import (
    best,
    hides_damage,
    in_limbo,
    in_view,
    is_any_in_limbo,
    longest,
    unheard_by_enough,
)
from failure_handler.members import HEARD_NS
from failure_handler.obstacles import MISSING_NS, obstacle
from failure_handler.state import Attempt, Begin, Confirm, Decide, Decision, Finish
from ziplog.core import distance
from ziplog.core.node import Broadcast, LogWarning, Propose, Send
from ziplog.core.view import fingerprint
from ziplog.wire import Freeze, Reinsert, Remove, ViewDecided

if TYPE_CHECKING:
    from collections.abc import Collection

    from failure_handler.candidate_selection import Candidate
    from failure_handler.members import Member, Members
    from failure_handler.state import AnyCommand, HandlerState, Recovered
    from ziplog.core.message import Message
    from ziplog.core.node import Effect
    from ziplog.core.view import Placement
    from ziplog.wire import Frozen, Reinserted, Removed, Suspect

#: Maximum number of different warnings for one attempt.
_MAX_WARNINGS: Final = 16
#: Time after a recovery in which suspicions of joined servers may be from before its end.
_BEGINNING_NS: Final = 7 * HEARD_NS
#: Maximum number of doublings of the time that a candidate or a survivor has.
_MAX_DOUBLINGS: Final = 4
_MAX_VIEW: Final = 2**32 - 1


class Recovery:
    """The leader's work on one shard."""

    def __init__(
        self,
        shard: int,
        state: HandlerState,
        members: Members,
        service: tuple[bytes, ...],
        *,
        now: int,
        rtt_ms: int = 0,
    ) -> None:
        """Start to watch a shard.

        Args:
            shard: its number.
            state: the committed state.
            members: the servers' reports.
            service: the names of the membership service's nodes.
            now: monotonic nanoseconds; silence counts from here on at the earliest.
            rtt_ms: as in the cluster file.

        """
        self.shard: Final = shard
        self._state: Final = state
        self._members: Final = members
        self._service: Final = service
        self._rtt_ms: Final = rtt_ms
        self._listening_since = self._now = now
        self._effects: list[Effect] = []
        #: When each step was last taken, by its name.
        self._last_done: dict[object, int] = {}
        self._proposed: tuple[bytes, int] | None = None
        self._trouble_since: int | None = None
        #: Since when no recovery runs.
        self._idle_since: int | None = None
        self._warned: set[str] = set()
        #: The last warning, and when its reason last held.
        self._problem = ("", 0)
        #: Number of attempts since the shard was last in the leases.
        self._attempts = 0
        # Of the newest attempt:
        self._recovery = 0
        self._removed: Removed | None = None
        self._freeze_sent_at: int | None = None
        self._frozen: Frozen | None = None
        self._decision: Decision | None = None
        # Of the current view:
        self._view = 0
        #: The reports of all replicas once they hold the whole log of the view, in their order.
        self._joined: list[Suspect] = []
        self._is_reinserted = False

    # --- events ---

    def forgive_silence_before(self, now: int) -> None:
        """Ignore silence before `now`: this process was paused."""
        self._listening_since = max(self._listening_since, now)

    def on_removed(self, message: Removed) -> None:
        """Store the limit of the newest attempt."""
        self._refresh()
        is_known = self.shard in self._members.placements
        if is_known and message.recovery == self._recovery and self._removed is None:
            self._removed = message
            self._members.on_removed(self.shard)

    def on_applied(self, command: bytes) -> None:
        """Forget a proposal that consensus applied or refused."""
        if self._proposed is not None and self._proposed[0] == command:
            self._proposed = None

    def on_frozen(self, route: bytes, message: Frozen) -> None:
        """Store the candidate's promise to the newest attempt."""
        known = self._refresh()
        if known is None or not known.is_under_way or message.recovery != self._recovery:
            return
        attempt = known.attempt
        members = self._members.of(self.shard)
        routes = [member.route for member in members if member.index == attempt.candidate]
        if (message.server, message.incarnation, [route]) == (
            attempt.candidate, attempt.incarnation, routes
        ):  # fmt: skip
            self._frozen = message

    def on_reinserted(self, message: Reinserted) -> None:
        """Store that the current view is in the leases."""
        self._refresh()
        if message.view == self._view and self._joined and not self._is_reinserted:
            self._is_reinserted = True
            self._members.on_reinserted(
                self.shard,
                self._view,
                [fingerprint(report.identity) for report in self._joined],
                [report.region for report in self._joined],
            )

    def on_refused(self, detail: str) -> None:
        """Warn that the membership service refused a request."""
        self._warn(f"the membership service refused the recovery of shard {self.shard}: {detail}")

    def advance(self, now: int) -> list[Effect]:
        """Take the next step, as far as possible now."""
        self._now = now
        known = self._refresh()
        placement = self._members.placements.get(self.shard)
        if placement is None:
            return []
        has_started = known is not None and placement.view >= known.view
        if known is not None and not (known.is_finished or self._joined or has_started):
            self._announce_decision(known, now)
        if known is None or (known.is_finished and not known.is_under_way):
            if known is not None and known.decision is not None and _is_older(placement, known):
                self._join(known, placement, now)
            else:
                self._check_suspicions(known, placement, now)
        elif known.is_under_way:
            self._continue_attempt(known, placement, now)
        else:
            self._join(known, placement, now)
        effects, self._effects = self._effects, []
        return effects

    @property
    def is_busy(self) -> bool:
        """Whether time alone may make the next step due."""
        known = self._state.shards.get(self.shard)
        return self._trouble_since is not None or (
            known is not None and (known.is_under_way or not known.is_finished)
        )

    def _refresh(self) -> Recovered | None:
        """Return the shard's state; reset the fields of an older attempt or view."""
        known = self._state.shards.get(self.shard)
        if known is not None and known.attempt.recovery != self._recovery:
            self._recovery = known.attempt.recovery
            self._attempts += 1
            self._removed, self._freeze_sent_at, self._frozen = None, None, None
            self._decision = None
            self._last_done.clear()
            self._warned.clear()
        if known is not None and (known.is_under_way or not known.is_finished):
            self._idle_since = None
        else:
            self._attempts = 0
        if known is not None and known.view != self._view:
            self._view = known.view
            self._joined, self._is_reinserted = [], False
            self._last_done.clear()
        return known

    # --- suspicion ---

    def _check_suspicions(self, known: Recovered | None, placement: Placement, now: int) -> None:
        """Begin a recovery if servers report a failure."""
        view = known.view if known is not None else placement.view
        candidates = in_view(self._members.of(self.shard), placement, view, view, now)
        if self._idle_since is None:
            self._idle_since = now
        # A joined server is about to start, and its earlier suspicions do not count.
        is_beginning = now < self._idle_since + _BEGINNING_NS
        has_trouble = any(
            one.report.state == "frozen"
            or (one.report.suspects and not (one.report.state == "joined" and is_beginning))
            for one in candidates
        )
        if candidates and not has_trouble:
            self._trouble_since = None
            return
        self._begin_with_best(known, placement, now)

    def _begin_with_best(
        self,
        known: Recovered | None,
        placement: Placement,
        now: int,
        excluded: Collection[int] = (),
    ) -> bool:
        """Begin an attempt with the best candidate but `excluded`; return whether there is one."""
        members = self._members.of(self.shard)
        if placement.state == "joining" and not is_any_in_limbo(members, now):
            return False  # only a crashed server (limbo) needs a recovery, not a slow one
        view = known.view if known is not None else placement.view
        if view < placement.view:
            self._warn(
                f"shard {self.shard} cannot be recovered: it is in view {placement.view}, but the"
                f" failure handler only has view {view}. Restore its latest data directory"
            )
            return False
        # A handler that lost its own directory must not guess which view was decided.
        has_forgotten = known is None and placement.state == "recovering"
        first = known.confirmed if known is not None else view
        candidates = [] if has_forgotten else in_view(members, placement, first, view, now)
        candidates = [one for one in candidates if one.member.index not in excluded]
        chosen: Candidate | None
        if candidates:
            if self._waits_for_primary(candidates, now):
                return False
            chosen = best(candidates)
            from_limbo = known is not None and _is_same_as_before(known, chosen)
        else:
            all_of_them = in_limbo(members, first, now)
            if known is None:  # The latest view of any of them is the current one.
                view = max([view, *(one.report.view for one in all_of_them)])
            chosen, from_limbo = self._longest_log(all_of_them, first, has_forgotten), True
        self._trouble_since = self._trouble_since if candidates else None
        if chosen is None or chosen.member.index in excluded:
            return False
        self._begin(view, known, placement, chosen, now, from_limbo=from_limbo)
        return True

    def _longest_log(
        self, all_of_them: list[Candidate], first: int, has_forgotten: bool
    ) -> Candidate | None:
        """Return the longest log, if all servers are in limbo; warn if none of them may lead.

        Args:
            all_of_them: the servers, if all of them are in limbo.
            first: the view that was confirmed last.
            has_forgotten: this handler lost what it knew of the recovery under way.

        """
        chosen = longest(all_of_them)
        if has_forgotten and not all_of_them:
            problem = (
                "the failure handler lost its data directory during a recovery, and does not know"
                " the view that was decided. Rebuild the membership service (ziplog membership"
                " rebuild)"
            )
        elif all_of_them and chosen is None:
            problem = (
                "none of its servers has its data directory. Restore one, and start its server"
            )
        elif chosen is not None and hides_damage(chosen, all_of_them, first):
            problem = (
                f"view {first} was confirmed, but all readable logs end before it. Restore a"
                " damaged data directory, and start its server"
            )
        else:
            return chosen
        self._warn(f"shard {self.shard} cannot be recovered: {problem}")
        return None

    def _waits_for_primary(self, candidates: list[Candidate], now: int) -> bool:
        """Whether to wait for the primary's report, as no candidate suspects the primary."""
        if self._trouble_since is None:
            self._trouble_since = now
        primary = self._members.of(self.shard)[0].recent_report(now)
        return (
            now < self._trouble_since + distance.primary_report_ns(self._rtt_ms)
            and primary is None
            and not any(0 in one.report.suspects for one in candidates)
        )

    def _begin(
        self,
        view: int,
        known: Recovered | None,
        placement: Placement,
        chosen: Candidate,
        now: int,
        *,
        from_limbo: bool,
    ) -> None:
        """Propose an attempt with a number that no server has seen."""
        seen = [
            number
            for member in self._members.of(self.shard)
            if member.suspect is not None and not member.has_forgotten(member.suspect)
            for number in (member.suspect.view, member.suspect.recovery, member.suspect.last_view)
        ]
        begun = known.attempt.recovery if known is not None else 0
        recovery = max(view, begun, placement.view, *seen) + 1
        if recovery > _MAX_VIEW:
            self._warn(f"shard {self.shard} cannot be recovered: its view numbers are used up")
            return
        base = view if chosen.report.state == "limbo" else chosen.report.view
        attempt = Attempt(
            recovery, chosen.member.index, chosen.report.incarnation, from_limbo, base,
            known is not None and _is_behind(known, chosen),
        )  # fmt: skip
        self._propose(Begin(self.shard, view, attempt), now)

    # --- state acquisition ---

    def _continue_attempt(self, known: Recovered, placement: Placement, now: int) -> None:
        """Continue the newest attempt, or begin another."""
        attempt = known.attempt
        member = self._members.of(self.shard)[attempt.candidate]
        if self._frozen is not None:
            self._decide(known, self._frozen, now)
            return
        if self._has_failed(member, attempt, now):
            excluded = self._excluded_candidate(member, attempt)
            if self._begin_with_best(known, placement, now, excluded=excluded):
                return
        self._acquire(known, member, now)

    def _has_failed(self, member: Member, attempt: Attempt, now: int) -> bool:
        """Whether the candidate has changed since its selection, or does not answer."""
        if member.suspect is not None and _is_misjudged(attempt, member.suspect):
            return True
        freeze_sent_at = self._freeze_sent_at
        patience = self._patient(distance.freeze_ns(self._rtt_ms))
        is_late = freeze_sent_at is not None and now - freeze_sent_at >= patience
        return is_late or self._is_silent(member, now)

    def _is_silent(self, member: Member, now: int) -> bool:
        """Whether the candidate or the survivor has probably failed."""
        silence = now - max(member.heard_at, self._listening_since)
        return silence >= self._patient(HEARD_NS)

    def _patient(self, time_ns: int) -> int:
        """Return the time for an answer to the newest attempt: each has twice that of the last one.

        Otherwise slow servers would replace each other for ever, each just before it answers.
        """
        return time_ns << min(max(self._attempts - 1, 0), _MAX_DOUBLINGS)

    def _excluded_candidate(self, member: Member, attempt: Attempt) -> list[int]:
        """Return the candidate that would fail again under another number, if it would."""
        report = member.suspect
        is_same = report is not None and not _is_misjudged(attempt, report)
        has_promised_more = report is not None and report.recovery > attempt.recovery
        return [member.index] if is_same and not has_promised_more else []

    def _acquire(self, known: Recovered, member: Member, now: int) -> None:
        """Request the removal of the shard from the leases, then the promise of the candidate."""
        removed, attempt = self._removed, known.attempt
        cluster, recovery = self._members.cluster, attempt.recovery
        if removed is None:
            if self._begin_step("remove", now):
                self._send_to_service(Remove(cluster, recovery, self.shard, known.view, recovery))
        elif member.route and self._begin_step("freeze", now):
            self._freeze_sent_at = now if self._freeze_sent_at is None else self._freeze_sent_at
            message = Freeze(
                cluster, self.shard, attempt.base, recovery, removed.limit, removed.runs,
                attempt.incarnation,
            )  # fmt: skip
            self._effects.append(Send(member.route, message))

    def _decide(self, known: Recovered, frozen: Frozen, now: int) -> None:
        removed, attempt = self._removed, known.attempt
        if removed is None:
            # A former leader got the promise, and knew the limit: request it again.
            self._acquire(known, self._members.of(self.shard)[attempt.candidate], now)
            return
        if self._decision is None:
            self._decision = self._make_decision(known, frozen, removed)
        is_confirmed = self._copies_needed(attempt.candidate) <= 1
        self._propose(Decide(self.shard, attempt.recovery, self._decision, is_confirmed), now)

    def _copies_needed(self, survivor: int) -> int:
        """Return the number of replicas that must hold a view before it is confirmed."""
        return self._members.copies_needed(self.shard, survivor, self._now)

    def _make_decision(self, known: Recovered, frozen: Frozen, removed: Removed) -> Decision:
        attempt = known.attempt
        is_lossy = attempt.from_limbo and (attempt.is_behind or not frozen.has_all)
        may_lose = is_lossy and frozen.decided_end < removed.limit
        lost = [max(frozen.decided_end, 1)] if may_lose else []
        if known.decision is not None and not known.is_finished and known.decision.lost_from:
            lost.append(known.decision.lost_from)  # the service has no record of that loss yet
        return Decision(
            attempt.candidate, attempt.incarnation, frozen.last, frozen.digest, min(lost, default=0)
        )

    # --- the new view ---

    def _announce_decision(self, known: Recovered, now: int) -> None:
        """Send the decision to every server that reports and has not started the current view.

        Those that have joined it must learn when it is confirmed.
        """
        decision = known.decision
        assert decision is not None, "a view that is not finished has a decision"
        routes = [
            member.route
            for member in self._members.of(self.shard)
            if (report := member.recent_report(now)) is not None
            and (report.view != known.view or report.state not in {"up", "frozen"})
            and self._begin_step(member.index, now)
        ]
        if routes:
            message = ViewDecided(
                self._members.cluster, self.shard, known.view, decision.survivor,
                decision.incarnation, decision.last, decision.digest,
                known.confirmed == known.view,
            )  # fmt: skip
            self._effects.append(Broadcast(tuple(routes), message))

    def _join(self, known: Recovered, placement: Placement, now: int) -> None:
        """Reinsert the shard when all have joined; begin again if the survivor is gone."""
        assert known.decision is not None
        if placement.state != "recovering" and placement.view == known.view:
            self._propose(Finish(self.shard, known.view), now)
            return
        joined = self._joined_reports(known.view, now)
        copies = self._copies_needed(known.decision.survivor)
        if known.confirmed < known.view and len(joined) >= copies:
            self._propose(Confirm(self.shard, known.view), now)
        if len(joined) == len(self._members.of(self.shard)) and not self._joined:
            self._joined = joined
        if self._joined:
            if self._begin_step("reinsert", now):
                self._send_to_service(
                    Reinsert(
                        self._members.cluster, known.view, self.shard, known.view,
                        [fingerprint(report.identity) for report in self._joined],
                        known.decision.lost_from, [report.region for report in self._joined],
                    )
                )  # fmt: skip
        elif self._is_survivor_lost(known.view, known.decision, now):
            self._begin_with_best(known, placement, now)
        elif known.confirmed < known.view:
            unheard = unheard_by_enough(self._members.of(self.shard), copies, now)
            if known.decision.survivor in unheard:
                self._begin_with_best(known, placement, now, unheard)

    def _joined_reports(self, view: int, now: int) -> list[Suspect]:
        """Return the reports of the replicas that hold the whole of `view`, in their order."""
        reports = [member.recent_report(now) for member in self._members.of(self.shard)]
        return [one for one in reports if one and one.state == "joined" and one.view == view]

    def _is_survivor_lost(self, view: int, decision: Decision, now: int) -> bool:
        """Whether the survivor was restarted, has left the view, or is silent."""
        member = self._members.of(self.shard)[decision.survivor]
        report = member.suspect
        if report is not None and (
            report.incarnation != decision.incarnation
            # A report from before the promise does not count.
            or (report.state == "limbo" and report.recovery >= view)
        ):
            return True
        return self._is_silent(member, now)

    # --- supervision ---

    def obstacle(self, now: int) -> str:
        """Return what the recovery waits for, and what an operator can do; "": for nothing."""
        known, placement = self._refresh(), self._members.placements.get(self.shard)
        if placement is None:
            return ""
        problem, held_at = self._problem
        if problem and now - held_at < MISSING_NS:
            return problem.removeprefix(f"shard {self.shard} cannot be recovered: ")
        members = self._members.of(self.shard)
        return obstacle(members, placement, known, self._listening_since, now)

    def unreachable(self, now: int) -> list[str]:
        """Return the servers that the recovery waits for and cannot reach."""
        known = self._refresh()
        placement = self._members.placements.get(self.shard)
        if (
            known is None
            or placement is None
            or placement.state != "recovering"
            or self._joined
            or (known.is_finished and not known.is_under_way)
        ):
            return []
        return [
            member.name
            for member in self._members.of(self.shard)
            if now - max(member.heard_at, self._listening_since)
            >= distance.restart_order_ns(self._rtt_ms)
        ]

    # --- effects ---

    def _begin_step(self, step: object, now: int) -> bool:
        """Return whether to take a step now, and record that it is taken; it is repeated later."""
        interval = distance.recovery_repeat_ns(self._rtt_ms)
        if now < self._last_done.get(step, now - interval) + interval:
            return False
        self._last_done[step] = now
        return True

    def _send_to_service(self, message: Message) -> None:
        """Send a request to all nodes of the membership service; the leader answers."""
        self._effects.append(Broadcast(self._service, message))

    def _propose(self, command: AnyCommand, now: int) -> None:
        encoded = command.encode()
        # One at a time: an earlier proposal may still be committed.
        if self._proposed is not None and now < self._proposed[1] + distance.proposal_retry_ns(
            self._rtt_ms
        ):
            return
        self._proposed = (encoded, now)
        self._effects.append(Propose(encoded))

    def _warn(self, text: str) -> None:
        """Log a warning for the operator, once for each attempt."""
        self._problem = (text, self._now)
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            self._effects.append(LogWarning(text))

    def check(self) -> None:
        """Assert the invariant."""
        known = self._state.shards.get(self.shard)
        assert known is not None or (self._recovery, self._view) == (0, 0)
        assert self._removed is None or self._removed.recovery == self._recovery
        assert self._frozen is None or self._frozen.recovery == self._recovery
        assert not self._is_reinserted or self._joined


def _is_older(placement: Placement, known: Recovered) -> bool:
    """Whether the service awaits a view that began: it was rebuilt from before `Finish`."""
    return placement.state == "recovering" and placement.view < known.view


def _is_misjudged(attempt: Attempt, report: Suspect) -> bool:
    """Whether the candidate was restarted or changed its view since the attempt began."""
    has_promised = report.recovery >= attempt.recovery
    is_elsewhere = report.state != "limbo" and report.view != attempt.base and not has_promised
    return report.incarnation != attempt.incarnation or is_elsewhere


def _is_behind(known: Recovered, chosen: Candidate) -> bool:
    """Whether the candidate's log ends before the last confirmed view.

    A view that has started is on all disks. A promise of an attempt may lengthen the log.
    """
    if known.is_under_way and known.attempt.is_behind:
        return True
    return not known.is_finished and chosen.report.last_view < known.confirmed


def _is_same_as_before(known: Recovered, chosen: Candidate) -> bool:
    """Whether a failed attempt chose the same candidate from limbo before."""
    attempt = known.attempt
    return (
        known.is_under_way
        and attempt.from_limbo
        and (attempt.candidate, attempt.incarnation)
        == (chosen.member.index, chosen.report.incarnation)
    )
