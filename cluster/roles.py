"""The role map and the life of a move, as one immutable value that is journalled whole. Pure.

::

    settled --plan--> planned --commit--> committed --finish--> settled
                         |  \\                 |
                      cancel  lost          undo / lost ------> settled (roles as before the plan)

*Planned*: the rank still has its old role; the actor of the new one gets ready. *Committed*: the map
shows the new role under a new epoch and the effects are under way (a learner group is resized, a
generator has left the table); nobody is told that it is done until it is finished. A rank has exactly
one role at every instant, and an epoch is never used twice.

Restart: the journal is read back as it was written. A planned move goes on waiting, with a new deadline; a
committed one that touches learners is handed to the training loop again at its next barrier, which answers
at once if its world has that shape already; any other committed move has no effect left to wait for and is
finished. So every half-done move is finished or undone, by the same code as without a restart.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from cluster import codec
from cluster.config import Config
from cluster.errors import nearest
from cluster.messages import Move, RankRow, Roles
from cluster.types import Record

ROLES = ("generator", "scorer", "learner")
SPARE = "spare"
Phase = Literal["settled", "planned", "committed"]


def member_name(role: str, rank: int, config: Config) -> str:
    """Name of the actor that serves ``role`` on ``rank``.

    Each role counts from its own first rank, wrapping around the ranks that the job started with, so that
    names are unique, every rank has one of each role, and a job that moves nothing has learner-0,
    generator-0, scorer-0. Ranks that joined later are counted by their own number.
    """
    total = starting_ranks(config)
    first = {"learner": 0, "generator": config.learner.ranks,
             "scorer": config.learner.ranks + config.generator.replicas}  # fmt: skip
    if role not in first:
        raise ValueError(f"no actor serves role {role!r}{nearest(role, first)}")
    return f"{role}-{rank if rank >= total else (rank - first[role]) % total}"


def starting_ranks(config: Config) -> int:
    """Ranks of the job at its start."""
    return config.learner.ranks + config.generator.replicas + config.scorer.replicas


class RoleMap(Record, frozen=True):
    """Who does what, and the move under way. Every method that changes something returns a new map."""

    epoch: int = 0
    ranks: tuple[RankRow, ...] = ()
    move: Move | None = None
    phase: Phase = "settled"
    moves: int = 0  # planned so far; the next one's id
    target: dict[str, int] = {}  # operator's wish by role; empty: none
    workers: int = 0  # env workers to run
    wanted: int = 0  # ranks that the job should own
    session: str = ""  # of the driver whose actors these are
    last: Move | None = None  # the newest that was finished

    @classmethod
    def first(cls, config: Config, epoch: int, session: str = "") -> "RoleMap":
        """The roles of the recipe: learners, then generators, then scorers."""
        counts = (("learner", config.learner.ranks), ("generator", config.generator.replicas),
                  ("scorer", config.scorer.replicas))  # fmt: skip
        roles = [role for role, count in counts for _ in range(count)]
        rows = tuple(RankRow(rank, role) for rank, role in enumerate(roles))
        return cls(epoch=epoch, ranks=rows, workers=config.env.workers, wanted=len(rows), session=session)

    def begin_anew(self, config: Config, session: str) -> "RoleMap":
        """For another driver, which started the recipe's actors: what an operator wished for stays."""
        first = RoleMap.first(config, self.epoch, session)
        wanted = max(first.wanted, self.wanted) if self.target else first.wanted
        return replace(first, moves=self.moves, target=self.target, workers=self.workers, wanted=wanted)

    # -- facts --------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Live ranks by role, spares included."""
        counts = dict.fromkeys((*ROLES, SPARE), 0)
        for row in self.ranks:
            if not row.lost:
                counts[row.role] += 1
        return counts

    def of(self, role: str) -> list[int]:
        """Live ranks that hold ``role``, in order."""
        return [row.rank for row in self.ranks if row.role == role and not row.lost]

    def serving(self, role: str) -> list[int]:
        """Those of ``of(role)`` that are at work: a committed move's rank is not, until it is finished."""
        coming = self.move.rank if self.move is not None and self.phase == "committed" else -1
        return [rank for rank in self.of(role) if rank != coming]

    def roles(self) -> Roles:
        """The map as it is told to others."""
        return Roles(epoch=self.epoch, ranks=self.ranks)

    @property
    def touches_learners(self) -> bool:
        """The move under way resizes the learner group."""
        return self.move is not None and "learner" in (self.move.source, self.move.target)

    def row(self, rank: int) -> RankRow:
        """Raises ValueError for a rank that the job does not have."""
        for row in self.ranks:
            if row.rank == rank:
                return row
        raise ValueError(f"no rank {rank}: the job has {[row.rank for row in self.ranks]}")

    # -- the life of a move -------------------------------------------------------------

    def plan(
        self, rank: int, target: str, reason: str = "", predicted_s: float = 0.0, cost_s: float = 0.0
    ) -> "RoleMap":
        """Rank ``rank`` shall become a ``target``. Raises ValueError for what cannot be."""
        row = self.row(rank)
        if self.move is not None:
            raise ValueError(f"move {self.move.id} of rank {self.move.rank} is under way: one at a time")
        if target not in (*ROLES, SPARE):
            raise ValueError(f"no role {target!r}{nearest(target, (*ROLES, SPARE))}")
        if row.lost or row.role == target:
            raise ValueError(f"rank {rank} {'is lost' if row.lost else f'is a {target} already'}")
        move = Move(id=self.moves, epoch=self.epoch, rank=rank, source=row.role, target=target,
                    reason=reason, predicted_s=predicted_s, cost_s=cost_s)  # fmt: skip
        return replace(self, move=move, phase="planned", moves=self.moves + 1)

    def cancel(self, move: int) -> "RoleMap":
        """Give up planned move ``move``: nothing had changed yet."""
        self._expect("planned", move)
        return replace(self, move=None, phase="settled")

    def commit(self, move: int, epoch: int) -> "RoleMap":
        """The barrier has come: the rank has its new role from ``epoch`` on."""
        made = self._expect("planned", move)
        changed = self._with(made.rank, made.target, epoch)
        return replace(changed, move=replace(made, epoch=epoch), phase="committed")

    def finish(self, move: int) -> "RoleMap":
        """All effects of committed move ``move`` are in place."""
        made = self._expect("committed", move)
        return replace(self, move=None, phase="settled", last=made)

    def undo(self, move: int, epoch: int) -> "RoleMap":
        """Committed move ``move`` failed: the rank has its old role again, under a new epoch."""
        made = self._expect("committed", move)
        return replace(self._with(made.rank, made.source, epoch), move=None, phase="settled")

    def refuses(self, move: int) -> str:
        """Why a report of how ``move`` ended is not taken; "" if that move is committed and waits for it.

        A report may be late: its move was given up, or made already, and another one is under way.
        """
        try:
            self._expect("committed", move)
        except ValueError as error:
            return str(error)
        return ""

    def _expect(self, phase: Phase, move: int) -> Move:
        if self.move is None or self.phase != phase:
            raise ValueError(f"no move is {phase}: the map is {self.phase}")
        if self.move.id != move:
            raise ValueError(f"move {move} is not under way: move {self.move.id} is")
        return self.move

    # -- ranks that come and go ---------------------------------------------------------

    def lose(self, ranks: Sequence[int], epoch: int) -> "RoleMap":
        """These ranks' node is gone. A move of one of them is off: its rank is lost with its old role."""
        changed = self
        if self.move is not None and self.move.rank in ranks:
            move = self.move.id
            changed = self.cancel(move) if self.phase == "planned" else self.undo(move, epoch)
        gone = {self.row(rank).rank for rank in ranks}
        rows = tuple(replace(r, lost=True) if r.rank in gone else r for r in changed.ranks)
        return replace(changed, ranks=rows, epoch=self._newer(epoch))

    def join(self, rows: Sequence[RankRow], epoch: int) -> "RoleMap":
        """Ranks of a node that came, or came back: they are spare. Raises ValueError for a live rank."""
        known = {row.rank: row for row in self.ranks}
        for row in rows:
            if row.rank in known and not known[row.rank].lost:
                raise ValueError(f"rank {row.rank} is a live {known[row.rank].role} and cannot join again")
            known[row.rank] = RankRow(row.rank, SPARE, row.node)
        ordered = tuple(known[rank] for rank in sorted(known))
        return replace(self, ranks=ordered, epoch=self._newer(epoch))

    def release(self, rank: int, epoch: int) -> "RoleMap":
        """Rank ``rank`` could not take up its role: it is spare."""
        return self._with(rank, SPARE, epoch)

    def located(self, nodes: dict[int, str]) -> "RoleMap":
        """Where ranks lie, as far as ``nodes`` tells (Ray node id by rank)."""
        rows = tuple(replace(row, node=nodes.get(row.rank, row.node)) for row in self.ranks)
        return replace(self, ranks=rows)

    def _with(self, rank: int, role: str, epoch: int) -> "RoleMap":
        rows = tuple(replace(row, role=role) if row.rank == rank else row for row in self.ranks)
        return replace(self, ranks=rows, epoch=self._newer(epoch))

    def _newer(self, epoch: int) -> int:
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not newer than {self.epoch}")
        return epoch

    # -- journal ------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The journal entry."""
        return codec.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "RoleMap":
        """What ``encode`` wrote. Raises ValueError for anything else."""
        return codec.decode(raw, cls)
