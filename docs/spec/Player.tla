------------------------------- MODULE Player --------------------------------
(* One task of a player: its cursor in the membership service, the processes that claim it, and a
   target that stores its position with its effects. player.md beside this file lists each rule and
   the module that implements it; docs/player.md is the specification in prose.

   Every rule has a switch: Off is the set of disabled rules. With Off = {} all invariants hold.
   With one rule off, the invariant that player.md names for it is violated.

   The target carries out a step that was sent once or never, at any time, also after its process
   has ended. Any owner may be suspected at any time. A process that lost its claim continues until
   it ends or is refused. *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS Procs,
          N,          \* the log has the records 0..N-1
          MaxTerm,    \* number of claims and seeks
          MaxSeek,    \* number of seeks
          MaxLoss,    \* how often the target loses all that it has
          Off         \* the disabled rules

Rules == {"one-transaction", "compare-start", "compare-term", "open-stores-term", "open-again",
          "effect-first", "move-in-term", "terms-grow", "count-seeks", "empty-is-lost", "hold"}

ASSUME Off \subseteq Rules

On(rule) == rule \notin Off

None == <<>>
Opening == N + 1        \* instead of the start and the stop of a batch

VARIABLES
  cursor,   \* [term, pos, moved, origins]; origins[s + 1]: where the seek s put it
  proc,     \* of each process: its claim [term, seek, claimed, moved], and [stage, pos, stop]
  sent,     \* steps on their way to the target: <<process, claim, start, stop>>
  row,      \* the position at the target: [term, pos, seek]
  effects,  \* the records at the target
  opened,   \* the greatest term that opened the target,
  late,     \* and whether a lower one had an effect after that
  trim,     \* the first position that is not trimmed
  losses

vars == <<cursor, proc, sent, row, effects, opened, late, trim, losses>>
target == <<row, effects, opened, late>>

Max(a, b) == IF a > b THEN a ELSE b
Range(from, to) == [i \in 1..(to - from) |-> from + i - 1]
Seeks == Len(cursor.origins) - 1

Init == /\ cursor = [term |-> 0, pos |-> 0, moved |-> FALSE, origins |-> <<0>>]
        /\ proc = [p \in Procs |-> None] /\ sent = {} /\ row = None /\ effects = <<>>
        /\ opened = 0 /\ late = FALSE /\ trim = 0 /\ losses = 0

\* --- the membership service ---

Claim(p) ==
  /\ proc[p] = None /\ cursor.term < MaxTerm /\ cursor.pos >= trim
  /\ LET term == IF On("terms-grow") \/ cursor.term = 0 THEN cursor.term + 1 ELSE cursor.term
         claim == [term |-> term, seek |-> Seeks, claimed |-> cursor.pos, moved |-> cursor.moved]
     IN /\ cursor' = [cursor EXCEPT !.term = term]
        /\ proc' = [proc EXCEPT ![p] = [claim |-> claim, stage |-> "closed", pos |-> 0, stop |-> 0]]
  /\ UNCHANGED <<sent, target, trim, losses>>

MoveTo(p, to) ==
  /\ proc[p].claim.term = cursor.term \/ ~On("move-in-term")
  /\ to > cursor.pos
  /\ cursor' = [cursor EXCEPT !.pos = to, !.moved = TRUE]
  /\ UNCHANGED <<proc, sent, target, trim, losses>>

Move(p) ==
  /\ proc[p] # None
  /\ \/ proc[p].stage = "open" /\ MoveTo(p, proc[p].pos)
     \/ proc[p].stage = "delivering" /\ ~On("effect-first") /\ MoveTo(p, proc[p].stop)

Seek(to) ==
  /\ Seeks < MaxSeek /\ cursor.term < MaxTerm /\ to >= trim
  /\ cursor' = [term |-> cursor.term + 1, pos |-> to, moved |-> FALSE,
                origins |-> Append(cursor.origins, to)]
  /\ UNCHANGED <<proc, sent, target, trim, losses>>

Trim(to) ==
  /\ to > trim /\ (to <= cursor.pos \/ ~On("hold"))
  /\ trim' = to
  /\ UNCHANGED <<cursor, proc, sent, target, losses>>

\* --- processes ---

End(p) == proc[p] # None /\ proc' = [proc EXCEPT ![p] = None]
          /\ UNCHANGED <<cursor, sent, target, trim, losses>>

SendOpen(p) ==
  /\ proc[p] # None /\ proc[p].stage = "closed"
  /\ sent' = sent \cup {<<p, proc[p].claim, Opening, Opening>>}
  /\ proc' = [proc EXCEPT ![p].stage = "opening"]
  /\ UNCHANGED <<cursor, target, trim, losses>>

Send(p, stop) ==
  /\ proc[p] # None /\ proc[p].stage = "open" /\ proc[p].pos >= trim /\ stop > proc[p].pos
  /\ sent' = sent \cup {<<p, proc[p].claim, proc[p].pos, stop>>}
  /\ proc' = [proc EXCEPT ![p].stage = "delivering", ![p].stop = stop]
  /\ UNCHANGED <<cursor, target, trim, losses>>

TimeOut(p) ==
  /\ proc[p] # None /\ proc[p].stage \in {"opening", "delivering"}
  /\ proc' = [proc EXCEPT ![p] =
       IF proc[p].stage = "delivering" /\ ~On("open-again")
       THEN [proc[p] EXCEPT !.stage = "open", !.pos = proc[p].stop, !.stop = 0]
       ELSE [proc[p] EXCEPT !.stage = "closed", !.pos = 0, !.stop = 0]]
  /\ UNCHANGED <<cursor, sent, target, trim, losses>>

\* --- the target ---

Awaited(s) ==
  LET p == s[1] IN
  /\ proc[p] # None /\ proc[p].claim.term = s[2].term
  /\ IF s[3] = Opening THEN proc[p].stage = "opening"
     ELSE proc[p].stage = "delivering" /\ proc[p].pos = s[3] /\ proc[p].stop = s[4]

\* The answer is lost, or arrives; a refusal (pos = Opening) ends the task.
Answer(s, pos) ==
  \/ UNCHANGED proc
  \/ /\ Awaited(s)
     /\ proc' = [proc EXCEPT ![s[1]] = IF pos = Opening THEN None
                  ELSE [@ EXCEPT !.stage = "open", !.pos = pos, !.stop = 0]]

Open(s) ==
  LET claim == s[2]
      refused == \/ row = None /\ claim.moved /\ On("empty-is-lost")
                 \/ row # None /\ row.term > claim.term
      isSought == row # None /\ row.seek < claim.seek
      pos == IF row = None \/ (isSought /\ On("count-seeks")) THEN claim.claimed ELSE row.pos
      term == IF row = None \/ On("open-stores-term") THEN claim.term ELSE row.term
      seek == IF row = None \/ isSought THEN claim.seek ELSE row.seek
  IN IF refused THEN Answer(s, Opening) /\ UNCHANGED target
     ELSE /\ row' = [term |-> term, pos |-> pos, seek |-> seek]
          /\ effects' = IF isSought THEN <<>> ELSE effects
          /\ opened' = Max(opened, claim.term) /\ UNCHANGED late
          /\ Answer(s, pos)

Accepted(s) ==
  /\ row # None
  /\ row.pos = s[3] \/ ~On("compare-start")
  /\ \/ ~On("compare-term")
     \/ IF On("open-stores-term") THEN row.term = s[2].term ELSE row.term <= s[2].term

Deliver(s) ==
  IF ~Accepted(s) THEN Answer(s, Opening) /\ UNCHANGED target
  ELSE /\ effects' = effects \o Range(s[3], s[4])
       /\ late' = (late \/ s[2].term < opened) /\ UNCHANGED opened
       /\ \/ row' = [row EXCEPT !.term = Max(@, s[2].term), !.pos = s[4]] /\ Answer(s, s[4])
          \/ ~On("one-transaction") /\ UNCHANGED <<row, proc>>

Step(s) == /\ sent' = sent \ {s}
           /\ IF s[3] = Opening THEN Open(s) ELSE Deliver(s)
           /\ UNCHANGED <<cursor, trim, losses>>

Lose == /\ losses < MaxLoss /\ row # None
        /\ row' = None /\ effects' = <<>> /\ opened' = 0 /\ losses' = losses + 1
        /\ UNCHANGED <<cursor, proc, sent, late, trim>>

Next == \/ \E p \in Procs : Claim(p) \/ Move(p) \/ End(p) \/ SendOpen(p) \/ TimeOut(p)
                            \/ \E stop \in 1..N : Send(p, stop)
        \/ \E to \in 0..N : Seek(to) \/ Trim(to)
        \/ \E s \in sent : Step(s)
        \/ Lose

Spec == Init /\ [][Next]_vars

\* A step that the target would refuse, and whose answer nothing awaits, can have no effect any more.
Dead(s) == /\ row # None /\ losses = MaxLoss /\ ~Awaited(s)
           /\ \/ row.term > s[2].term
              \/ row.term = s[2].term /\ s[3] # Opening /\ s[3] < row.pos
View == <<cursor, proc, {s \in sent : Off # {} \/ ~Dead(s)}, target, trim, losses>>

\* --- invariants ---

\* The target has the records from the sought position to its own, each once, in order.
ExactlyOnce == IF row = None THEN effects = <<>>
               ELSE effects = Range(cursor.origins[row.seek + 1], row.pos)

\* No batch has an effect once a later term has opened the target.
Fence == ~late

\* A cursor that has moved is not above the position of a target that has lost nothing.
CursorBehind == cursor.moved /\ losses = 0 =>
                row # None /\ row.seek = Seeks /\ cursor.pos <= row.pos

\* No two processes have the same term.
OneOwner == \A p, q \in Procs : p # q /\ proc[p] # None /\ proc[q] # None =>
                                proc[p].claim.term # proc[q].claim.term

\* The records from the cursor on are in the log.
Held == trim <= cursor.pos
==============================================================================
