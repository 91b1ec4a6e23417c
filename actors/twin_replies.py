"""What a timed twin answers: how long a reply is, which ids it has, which versions they carry.

All of it follows from (seed, session, turn), so that a trajectory is the same whatever was paused, retried or
synced on its way.
"""

import hashlib
import random
from pathlib import Path

import msgspec

from cluster.config import Config
from cluster.errors import ConfigError
from cluster.model_folder import ids_in_use
from cluster.sim.scenario import Plan, Workload
from cluster.types import Request, StopReason, VersionSpan
from envs.load import MEMBERS, place_of, workload


class Plans:
    """Planned lengths of the replies, when the environment follows plans."""

    def __init__(self, config: Config) -> None:
        self._source: Workload | None = None
        self._seed = config.run.seed
        self._known: dict[str, Plan] = {}
        if config.env.name == "load":
            self._source = workload(str(config.env.params.get("workload", "twin")))
            self._seed = int(config.env.params.get("seed", config.run.seed))

    def of(self, request: Request) -> tuple[Plan | None, int]:
        """The plan that a request's session follows, None if it follows none, and the turn."""
        turn = turn_of(request)
        place = place_of(request.session) if self._source is not None else None
        if place is None or self._source is None:
            return None, turn
        plan = self._known.get(request.session)
        if plan is None:
            if len(self._known) > 4096:
                self._known.clear()
            plan = self._known[request.session] = self._source.plan(self._seed, place.group, place.member)
        return (plan, turn) if turn < len(plan.turns) else (None, turn)


class Words:
    """Ids that a reply is made of: seeded, never special."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.size = ids_in_use(folder)
        tree = msgspec.json.decode((folder / "tokenizer.json").read_bytes())
        vocabulary = tree["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            vocabulary = {entry[0]: at for at, entry in enumerate(vocabulary)}
        special = {token["id"] for token in tree.get("added_tokens", ())}
        self._members = [vocabulary[word] for word in MEMBERS if word in vocabulary]
        self._plain = sorted(set(vocabulary.values()) - special - set(self._members))
        if not self._plain:
            raise ConfigError(f"{folder}/tokenizer.json has no word that is not special")
        self._seed = seed

    def count(self, request: Request) -> int:
        """A length for a reply that no plan gives one."""
        raw = hashlib.blake2b(f"{self._seed}/{request.session}/{request.id}".encode(), digest_size=4).digest()
        return 1 + int.from_bytes(raw, "little") % request.sampling.max_tokens

    def reply(
        self, request: Request, session: str, turn: int, count: int
    ) -> tuple[list[int], list[float], StopReason]:
        """``count`` ids, their log-probs and why they end: the member's word first, a stop id last."""
        rng = random.Random(f"{self._seed}/{session}/{turn}")
        stops = request.sampling.stop_ids
        forbidden = set(stops)
        chosen = [token for token in rng.choices(self._plain, k=count + 8) if token not in forbidden]
        chosen = (chosen or [self._plain[0]]) * (1 + count // max(1, len(chosen)))
        chosen = chosen[:count]
        place = place_of(session)
        if place is not None and place.member < len(self._members):
            chosen[0] = self._members[place.member]
        stop = StopReason.LENGTH
        if stops and count < request.sampling.max_tokens and count > 1:
            chosen[-1], stop = stops[0], StopReason.STOP
        return chosen, [-rng.expovariate(2.0) for _ in chosen], stop


def turn_of(request: Request) -> int:
    """The turn in a request's name (``g0000001.0/attempt/turn``, ``#n`` when asked again), 0 without one."""
    last = request.id.partition("#")[0].rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in request.id else 0


def tile(marks: list[tuple[int, int]], last: int, count: int) -> tuple[VersionSpan, ...]:
    """Spans that cover ``count`` ids: up to each mark the version before it, then ``last``."""
    spans: list[VersionSpan] = []
    at = 0
    for upto, version in [*marks, (count, last)]:
        if upto <= at:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, upto)
        else:
            spans.append(VersionSpan(version, at, upto))
        at = upto
    return tuple(spans)
