-------------------------------- MODULE Shard --------------------------------
(* One shard of Ziplog: replication, epochs, frontiers, and recovery by views. A failure handler
   coordinates recoveries, and may crash at any step. README.md beside this file lists each rule and
   the module that implements it; docs/protocol.md is the protocol in prose.

   Every rule has a switch: Off is the set of disabled rules. With Off = {} all invariants hold.
   With one rule off, the invariant that README.md names for it is violated.

   A client's copy of a record reaches a server at any time, or never. acks is the set of all acks
   ever sent. An insert is complete as soon as all servers of one view have acked the same slot. A
   value is delivered to subscribers as soon as it may be: the more is delivered, the more can be
   contradicted. State that can have no effect any more is set to one value. Examples are the memory
   of a dead server, a forward that its receiver will never apply, and the beginning of a view that
   all servers have entered. *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS Servers, Primary, Records,
          E,          \* the shard's positions 1..E are in epoch 1,
          N,          \* and E+1..N in epoch 2
          MaxView,    \* views are 1..MaxView: at most MaxView - 1 attempts to recover
          MaxCrash,   \* number of server crashes
          Merge,      \* TRUE: a subscriber merges this shard with another one
          After,      \* an append of another shard lies right after this position; 0: no append
          Late,       \* the record that is inserted once that append returned
          Alone,      \* TRUE: an operator gave up all other servers, and one copy confirms a view
          Off         \* the disabled rules

Rules == {"no-reslot", "restart-is-failure", "roll-forward-guesses", "freeze", "views",
          "stable-reads", "decided-only", "two-copies", "one-decision", "remove-copies", "recognise",
          "gapless-stream", "token", "closed-epoch", "primary-noops", "announced-epochs",
          "noop-after-freeze", "durable-decision", "no-way-back", "separate-recoveries", "confirm",
          "least-frontier", "told-decided", "told-members", "told-frozen", "told-guess"}

ASSUME Off \subseteq Rules /\ Primary \in Servers /\ 1 <= E /\ E <= N
ASSUME After \in 0..N /\ Late \in Records

On(rule) == rule \notin Off

None == "none"
Noop == "no-op"
Nobody == "nobody"

VARIABLES
  \* servers
  slot, decided,  \* the content of each slot, and the slots that are decided, not guessed
  alive, frozen,  \* frozen[s]: the recovery to which s promised to store nothing more; 0: none
  sview,          \* the view of server s
  seen,           \* records received from their client in this view
  stable,         \* the last position of which s knows that all servers hold it decided
  fwd,            \* forwards in transit to each backup: <<value, first, last, view>>
  acks,           \* <<record, server, slot, view>>
  \* the state that the failure handler has committed by consensus
  view, attempt, candidate, confirmed, finished, decision,
  base,           \* the view before the decision (only if "durable-decision" is off; else 0)
  \* the memory of the failure handler's leader
  answer,
  \* the membership service: the view to which epoch 2 was granted; 0: none yet
  grant,
  \* readers: values delivered from this shard, the other shard's frontier, number of merged values
  told, other, given,
  answered,       \* 1: the append of another shard returned
  crashes

servers == <<slot, decided, alive, frozen, sview, seen, stable>>
handler == <<view, attempt, candidate, confirmed, finished, decision, base, answer>>
readers == <<told, other, given, answered>>
vars == <<servers, fwd, acks, handler, grant, readers, crashes>>

Backups == Servers \ {Primary}
Slots == 1..N
F == Cardinality(Servers) - 1
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Empty == [g \in Slots |-> None]

Init == /\ slot = [s \in Servers |-> Empty] /\ decided = [s \in Servers |-> {}]
        /\ alive = [s \in Servers |-> TRUE] /\ frozen = [s \in Servers |-> 0]
        /\ sview = [s \in Servers |-> 1] /\ seen = [s \in Servers |-> {}]
        /\ stable = [s \in Servers |-> 0]
        /\ fwd = [b \in Backups |-> <<>>] /\ acks = {}
        /\ view = 1 /\ attempt = 1 /\ candidate = Nobody /\ confirmed = 1 /\ finished = 1
        /\ decision = <<>> /\ base = 0 /\ answer = <<>>
        /\ grant = 0 /\ told = <<>> /\ other = 0 /\ given = 0 /\ answered = 0 /\ crashes = 0

----------------------------------------------------------------------------
(* Positions. View 1 has epoch 1. Epoch 2 belongs to the view to which it was granted. *)

First(v) == IF v = 1 THEN 1 ELSE E + 1
Last(v) == IF grant = v THEN N ELSE E
Next1(s) == LET filled == {g \in First(sview[s])..Last(sview[s]) : slot[s][g] # None} IN
            IF filled = {} THEN First(sview[s]) ELSE Max(filled) + 1
\* The last position that a recovery settles: the end of the last announced epoch.
Settled == IF grant # 0 /\ On("announced-epochs") THEN N ELSE E
\* The last position that the recovery of the current view settled.
BeginsWith == IF 0 < grant /\ grant < view THEN N ELSE E

\* The slots that a new record may get. A backup enters epoch 2 by its own clock. The primary first
\* decides the rest of epoch 1.
Choices(s) ==
  LET g == Next1(s) end == Last(sview[s]) IN
  (IF g <= end THEN {g} ELSE {})
  \cup (IF g <= E /\ E < end /\ (s # Primary \/ ~On("token")) THEN {E + 1} ELSE {})
  \cup (IF s = Primary /\ ~On("closed-epoch") /\ sview[s] = 1 /\ g > E
        THEN {x \in 1..E : slot[s][x] = Noop} ELSE {})

----------------------------------------------------------------------------
(* Replication. *)

\* A server that joined a view works in it once the view has started for all servers.
Works(s) == alive[s] /\ frozen[s] = 0 /\ (On("separate-recoveries") => sview[s] = finished)
Ack(r, s, g) == <<r, s, g, IF On("views") THEN sview[s] ELSE 0>>
\* Whether b can ever apply a forward that is sent now.
Reachable(b, v) == alive[b] /\ frozen[b] = 0 /\ (On("views") => sview[b] = v)
Send(r, first, last) ==
  LET v == sview[Primary] IN
  fwd' = [b \in Backups |-> IF Reachable(b, v) THEN Append(fwd[b], <<r, first, last, v>>) ELSE fwd[b]]
Fill(row, r, first, last) == [g \in Slots |-> IF first <= g /\ g <= last THEN r ELSE row[g]]
\* Deliver the values up to a frontier to subscribers.
Tell(row, frontier) ==
  told' = IF frontier > Len(told) THEN told \o [i \in 1..(frontier - Len(told)) |-> row[Len(told) + i]]
          ELSE told

Insert(r, s) ==
  /\ Works(s) /\ r \notin seen[s] /\ ((After > 0 /\ r = Late) => answered = 1)
  /\ seen' = [seen EXCEPT ![s] = @ \cup {r}]
  /\ IF On("recognise") /\ \E g \in Slots : slot[s][g] = r
     THEN /\ acks' = acks \cup {Ack(r, s, Min({g \in Slots : slot[s][g] = r}))}
          /\ UNCHANGED <<slot, decided, fwd>>
     ELSE \E g \in Choices(s) :
          /\ slot' = [slot EXCEPT ![s][g] = r]
          /\ acks' = acks \cup {Ack(r, s, g)}
          /\ IF s = Primary
             THEN decided' = [decided EXCEPT ![s] = @ \cup {g}] /\ Send(r, g, g)
             ELSE UNCHANGED <<decided, fwd>>
  /\ UNCHANGED <<alive, frozen, sview, stable, handler, grant, readers, crashes>>

\* All undecided positions up to `last` become no-ops: for a reader that waits, or up to the end of
\* an epoch (the token).
Skip(s, last) ==
  /\ Works(s) /\ (s = Primary \/ ~On("primary-noops"))
  /\ Next1(s) <= last /\ last <= Last(sview[s])
  /\ slot' = [slot EXCEPT ![s] = Fill(@, Noop, Next1(s), last)]
  /\ decided' = [decided EXCEPT ![s] = @ \cup (Next1(s)..last)]
  /\ IF s = Primary THEN Send(Noop, Next1(s), last) ELSE UNCHANGED fwd
  /\ UNCHANGED <<alive, frozen, sview, seen, stable, acks, handler, grant, readers, crashes>>

\* A backup receives the i-th forward in transit; the earlier ones are lost.
Forward(b, i) ==
  /\ Works(b) /\ i <= Len(fwd[b]) /\ (On("gapless-stream") => i = 1)
  /\ fwd' = [fwd EXCEPT ![b] = SubSeq(@, i + 1, Len(@))]
  /\ LET m == fwd[b][i] r == m[1] first == m[2] last == m[3]
         end == Last(sview[b])
         old == slot[b][first]
         cleared == [g \in Slots |-> IF On("remove-copies") /\ r # Noop /\ slot[b][g] = r
                                     THEN None ELSE slot[b][g]]
         put == Fill(cleared, r, first, last)
         \* "no-reslot" off: the displaced record gets the next slot, and displaces its content
         moved == IF ~On("no-reslot") /\ old \in Records /\ old # r /\ last + 1 <= end
                  THEN [g \in Slots |-> IF g = last + 1 THEN old
                                        ELSE IF g = last + 2 /\ g <= end /\ put[last + 1] \in Records
                                        THEN put[last + 1] ELSE put[g]]
                  ELSE put
     IN IF On("views") /\ m[4] # sview[b] THEN UNCHANGED <<slot, decided, acks>>
        ELSE /\ slot' = [slot EXCEPT ![b] = moved]
             /\ decided' = [decided EXCEPT ![b] = @ \cup (first..last)]
             /\ acks' = IF r = Noop THEN acks ELSE acks \cup {Ack(r, b, first)}
  /\ UNCHANGED <<alive, frozen, sview, seen, stable, handler, grant, readers, crashes>>

\* The last position up to which a server reports that it holds the primary's decisions.
Held(s) == Max({0} \cup (IF On("decided-only") THEN decided[s] ELSE {g \in Slots : slot[s][g] # None}))

\* The primary has received the reports of all servers ...
Report ==
  /\ \A s \in Servers : Works(s) /\ sview[s] = sview[Primary]
  /\ LET m == Min({Held(s) : s \in Servers}) IN
     /\ m > stable[Primary]
     /\ stable' = [stable EXCEPT ![Primary] = m] /\ Tell(slot[Primary], m)
  /\ UNCHANGED <<slot, decided, alive, frozen, sview, seen, fwd, acks, handler, grant, other, given,
                 answered, crashes>>
\* ... and sends the stable point to the backups.
Learn(b) ==
  /\ Works(b) /\ alive[Primary] /\ sview[b] = sview[Primary] /\ stable[Primary] > stable[b]
  /\ stable' = [stable EXCEPT ![b] = stable[Primary]] /\ Tell(slot[b], stable[Primary])
  /\ UNCHANGED <<slot, decided, alive, frozen, sview, seen, fwd, acks, handler, grant, other, given,
                 answered, crashes>>

\* Decisions that the only backup has applied are on both servers.
Hold(b) ==
  /\ Works(b) /\ (Cardinality(Servers) = 2 \/ ~On("two-copies")) /\ Held(b) > stable[b]
  /\ stable' = [stable EXCEPT ![b] = Held(b)] /\ Tell(slot[b], Held(b))
  /\ UNCHANGED <<slot, decided, alive, frozen, sview, seen, fwd, acks, handler, grant, other, given,
                 answered, crashes>>

----------------------------------------------------------------------------
(* Crashes. Positions that the server knew to be stable are on its disk; the rest is lost. *)

Disconnect(s) == fwd' = IF s \in Backups THEN [fwd EXCEPT ![s] = <<>>] ELSE fwd

Crash(s) ==
  /\ alive[s] /\ crashes < MaxCrash /\ \E t \in Servers \ {s} : alive[t]
  /\ crashes' = crashes + 1
  /\ alive' = [alive EXCEPT ![s] = FALSE]
  /\ slot' = [slot EXCEPT ![s] = [g \in Slots |-> IF g <= stable[s] THEN @[g] ELSE None]]
  /\ decided' = [decided EXCEPT ![s] = @ \cap (1..stable[s])]
  /\ frozen' = [frozen EXCEPT ![s] = 0] /\ seen' = [seen EXCEPT ![s] = {}]
  /\ Disconnect(s)
  /\ UNCHANGED <<sview, stable, acks, handler, grant, readers>>

Restart(s) ==
  /\ ~On("restart-is-failure") /\ ~alive[s] /\ sview[s] = view
  /\ alive' = [alive EXCEPT ![s] = TRUE]
  /\ UNCHANGED <<slot, decided, frozen, sview, seen, stable, fwd, acks, handler, grant, readers, crashes>>

\* Another node of the failure handler becomes leader. It knows only the committed state.
HandlerCrash ==
  \/ /\ answer # <<>>
     /\ answer' = <<>>
     /\ UNCHANGED <<servers, fwd, acks, view, attempt, candidate, confirmed, finished, decision, base,
                    grant, readers, crashes>>
  \/ /\ 0 < base /\ base < view   \* "durable-decision" off: the decision was not committed
     /\ view' = base /\ attempt' = base /\ confirmed' = base /\ finished' = base
     /\ candidate' = Nobody /\ decision' = <<>> /\ answer' = <<>> /\ base' = 0
     /\ UNCHANGED <<servers, fwd, acks, grant, readers, crashes>>

----------------------------------------------------------------------------
(* Recovery: Begin, Acquire, Decide, Enter (by each server), Confirm, Finish; then Grant. *)

UnderWay == attempt > view

\* The handler commits an attempt. The membership service grants the shard no more leases.
Begin(c) ==
  /\ attempt < MaxView /\ alive[c] /\ c # candidate
  /\ On("no-way-back") => sview[c] >= confirmed
  /\ attempt' = attempt + 1 /\ candidate' = c /\ answer' = <<>>
  /\ UNCHANGED <<servers, fwd, acks, view, confirmed, finished, decision, base, grant, readers, crashes>>

\* The content of a server's slots, rolled forward.
Rolled(s) == [g \in Slots |-> IF g > Settled THEN None
                              ELSE IF slot[s][g] # None /\ (On("roll-forward-guesses") \/ g \in decided[s])
                              THEN slot[s][g] ELSE Noop]
Promise(s, recovery) ==
  IF On("freeze") THEN frozen' = [frozen EXCEPT ![s] = recovery] /\ Disconnect(s)
  ELSE UNCHANGED <<frozen, fwd>>

\* The candidate promises to store nothing more, and sends its slots to the handler.
Acquire(c) ==
  /\ UnderWay /\ c = candidate /\ alive[c] /\ answer = <<>>
  /\ Promise(c, attempt)
  /\ answer' = Rolled(c)
  /\ UNCHANGED <<slot, decided, alive, sview, seen, stable, acks, view, attempt, candidate, confirmed,
                 finished, decision, base, grant, readers, crashes>>

\* The handler commits the beginning of the next view.
Decide ==
  /\ UnderWay /\ answer # <<>>
  /\ view' = attempt /\ decision' = <<answer, candidate>>
  /\ candidate' = Nobody /\ answer' = <<>>
  /\ confirmed' = IF F <= 1 THEN attempt ELSE confirmed   \* the survivor has the only copy
  /\ base' = IF On("durable-decision") THEN 0 ELSE view
  /\ UNCHANGED <<servers, fwd, acks, attempt, finished, grant, readers, crashes>>

\* "one-decision" off: a second handler, without knowledge of the first, decides the same view.
DecideAgain(c) ==
  /\ ~On("one-decision") /\ ~UnderWay /\ alive[c] /\ sview[c] < view
  /\ Promise(c, view)
  /\ decision' = <<Rolled(c), c>>
  /\ UNCHANGED <<slot, decided, alive, sview, seen, stable, acks, view, attempt, candidate, confirmed,
                 finished, base, answer, grant, readers, crashes>>

\* The survivor enters the view as the process that promised; the other servers copy its log. No
\* server breaks a promise to a later recovery. Servers not reached yet continue in the old view.
Enter(t) ==
  /\ decision # <<>> /\ sview[t] < view
  /\ On("separate-recoveries") => frozen[t] <= view
  /\ LET survivor == decision[2] IN
     /\ alive[survivor]
     /\ IF t = survivor THEN (On("freeze") /\ On("separate-recoveries")) => frozen[t] = view
        ELSE sview[survivor] = view
  /\ LET row == decision[1]
         known == IF confirmed = view \/ ~On("confirm") THEN Settled ELSE stable[t]
     IN /\ slot' = [slot EXCEPT ![t] = row] /\ stable' = [stable EXCEPT ![t] = known]
        /\ Tell(row, known)
  /\ decided' = [decided EXCEPT ![t] = 1..Settled]
  /\ sview' = [sview EXCEPT ![t] = view] /\ alive' = [alive EXCEPT ![t] = TRUE]
  /\ frozen' = [frozen EXCEPT ![t] = 0] /\ seen' = [seen EXCEPT ![t] = {}]
  /\ decision' = IF \A s \in Servers \ {t} : sview[s] = view THEN <<>> ELSE decision
  /\ IF On("views") THEN Disconnect(t) ELSE UNCHANGED fwd
  /\ UNCHANGED <<acks, view, attempt, candidate, confirmed, finished, base, answer, grant, other, given,
                 answered, crashes>>

Joined == {s \in Servers : sview[s] = view}

\* f replicas hold all of the view (one, if an operator gave up the others): its new part may be
\* delivered, and no recovery goes back to an earlier view.
Confirm ==
  /\ ~UnderWay /\ confirmed < view /\ Cardinality(Joined) >= (IF Alone THEN 1 ELSE F)
  /\ confirmed' = view
  /\ UNCHANGED <<servers, fwd, acks, view, attempt, candidate, finished, decision, base, answer, grant,
                 readers, crashes>>

Settle(t) ==
  /\ F > 1 /\ confirmed = view /\ view > 1 /\ alive[t] /\ sview[t] = view /\ stable[t] < BeginsWith
  /\ stable' = [stable EXCEPT ![t] = BeginsWith] /\ Tell(slot[t], BeginsWith)
  /\ UNCHANGED <<slot, decided, alive, frozen, sview, seen, fwd, acks, handler, grant, other, given,
                 answered, crashes>>

\* All f+1 servers hold the view: the membership service takes the shard back.
Finish ==
  /\ ~UnderWay /\ finished < view /\ Joined = Servers
  /\ finished' = view /\ confirmed' = view
  /\ UNCHANGED <<servers, fwd, acks, view, attempt, candidate, decision, base, answer, grant, readers, crashes>>

\* The membership service grants epoch 2 to the shard, irrevocably.
Grant ==
  /\ ~UnderWay /\ finished = view /\ grant = 0 /\ E < N
  /\ grant' = view
  /\ UNCHANGED <<servers, fwd, acks, handler, readers, crashes>>

----------------------------------------------------------------------------
(* Readers. With Merge, another shard owns one position right before this shard's second one. *)

\* "stable-reads" off: a subscriber accepts every value that one server holds.
Subscribe(s) ==
  /\ ~On("stable-reads") /\ alive[s] /\ Len(told) < N /\ slot[s][Len(told) + 1] # None
  /\ told' = Append(told, slot[s][Len(told) + 1])
  /\ UNCHANGED <<servers, fwd, acks, handler, grant, other, given,
                 answered, crashes>>

\* "noop-after-freeze" off: positions of a silent shard are delivered as no-ops.
DeclareNoop ==
  /\ ~On("noop-after-freeze") /\ UnderWay /\ Len(told) < Settled
  /\ told' = Append(told, Noop)
  /\ UNCHANGED <<servers, fwd, acks, handler, grant, other, given,
                 answered, crashes>>

OtherMoves ==
  /\ Merge /\ other = 0 /\ other' = 1
  /\ UNCHANGED <<servers, fwd, acks, handler, grant, told, given, answered, crashes>>

HandOut ==
  /\ Merge /\ given < Len(told)
  /\ given + 1 < 2 \/ other = 1 \/ ~On("least-frontier")
  /\ given' = given + 1
  /\ UNCHANGED <<servers, fwd, acks, handler, grant, told, other, answered, crashes>>

(* An append of another shard returns once a server has reported this shard's positions before it as
   stable. Each rule excludes something less. *)
Answer ==
  /\ After > 0 /\ answered = 0
  /\ \/ Len(told) >= After
     \/ ~On("told-decided") /\ alive[Primary] /\ 1..After \subseteq decided[Primary]
     \/ ~On("told-members") /\ UnderWay
     \/ ~On("told-frozen") /\ \E s \in Servers : frozen[s] # 0
     \/ ~On("told-guess") /\ \E b \in Backups : alive[b] /\ \A g \in 1..After : slot[b][g] # None
  /\ answered' = 1
  /\ UNCHANGED <<servers, fwd, acks, handler, grant, told, other, given, crashes>>

Next == \/ \E r \in Records, s \in Servers : Insert(r, s)
        \/ \E s \in Servers, g \in Slots : Skip(s, g)
        \/ \E b \in Backups : Learn(b) \/ Hold(b) \/ \E i \in 1..Len(fwd[b]) : Forward(b, i)
        \/ Report \/ HandlerCrash \/ Decide \/ Confirm \/ Finish \/ Grant
        \/ \E s \in Servers : \/ Crash(s) \/ Restart(s) \/ Begin(s) \/ Acquire(s) \/ DecideAgain(s)
                              \/ Enter(s) \/ Settle(s) \/ Subscribe(s)
        \/ DeclareNoop \/ OtherMoves \/ HandOut \/ Answer

Spec == Init /\ [][Next]_vars
Symmetry == Permutations(IF After > 0 THEN Records \ {Late} ELSE Records)

----------------------------------------------------------------------------
(* Invariants. *)

Done(r, g) == \E v \in 0..MaxView : \A s \in Servers : <<r, s, g, v>> \in acks
Current(s) == alive[s] /\ sview[s] = view

\* A record that all servers of a view acked is in every later view, at its position.
AckedStays == \A r \in Records, g \in Slots : Done(r, g) => \A s \in Servers : Current(s) => slot[s][g] = r

\* A value delivered at a position equals every other value delivered there, and the acked one.
MayTell(s, g) == \/ g <= stable[s] \/ (view > 1 /\ sview[s] = view)
                 \/ (~On("stable-reads") /\ slot[s][g] # None)
DelivAgree == \A g \in 1..Len(told) :
  /\ \A r \in Records : Done(r, g) => told[g] = r
  /\ \A s \in Servers : (alive[s] /\ MayTell(s, g)) => slot[s][g] = told[g]

\* Stable positions have the same content on all servers of a view.
StableAgree == \A s, t \in Servers : (alive[s] /\ alive[t] /\ sview[s] = sview[t]) =>
                 \A g \in 1..stable[s] : slot[s][g] = slot[t][g]

\* A view has one beginning.
ViewAgree == view > 1 => \A s, t \in Servers : (Current(s) /\ Current(t)) =>
                           \A g \in 1..BeginsWith : slot[s][g] = slot[t][g]

\* A record has at most one decided position.
NoDup == \A s \in Servers : Current(s) => \A g, h \in decided[s] :
           (g < h /\ slot[s][g] \in Records) => slot[s][g] # slot[s][h]

\* A frontier never passes an undecided position.
NoHole == \A s \in Servers : alive[s] => \A g \in 1..stable[s] : slot[s][g] # None

\* Within a view, the primary's decision for a position never changes.
DecidedStays == \A b \in Backups : (alive[b] /\ alive[Primary] /\ sview[b] = sview[Primary]) =>
                  \A g \in decided[b] \cap decided[Primary] : slot[b][g] = slot[Primary][g]

\* A subscriber delivers no position before all earlier positions are decided.
NoGap == given >= 2 => other = 1

\* A record that is inserted after an append of another shard returned is above it.
LaterAbove == After > 0 => \A g \in 1..After :
                /\ ~Done(Late, g)
                /\ \A s \in Servers : (Current(s) /\ g \in decided[s]) => slot[s][g] # Late
=============================================================================
