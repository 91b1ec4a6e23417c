"""One generator rank as a machine in virtual time: requests, weight updates, counters. Pure.

The simulator drives it with simulated time, the timed twin of a generator with the wall clock; nothing in it
knows the difference. How it passes time is in cluster/sim/engine.py.

**Weight updates**: ``pause`` and ``resume`` bound the load; ``sync`` sets the version. Prompts without
a token start again under the new salt. Sequences that have tokens keep their KV (``keep``) or are computed
again.
"""

from collections.abc import Hashable
from math import inf

from cluster.sim.engine import Engine
from cluster.sim.engine_request import OVER, RUNNING, WAITING, EngineRequest


class GeneratorModel(Engine):
    """See the module docstring. Times must not go backwards; every method takes the time now.

    ``advance`` returns what has finished since the last call; the other methods bring the model to ``now``
    first and keep what finishes for the next ``advance``.
    """

    __slots__ = ()

    # -- what is asked of it ------------------------------------------------------------------

    def submit(
        self, now: float, key: Hashable, session: Hashable, prompt_tokens: int, output_tokens: int,
        salt: int, *, group: Hashable = None, shared: int = 0, prefix: int = -1, urgent: bool = False,
    ) -> None:  # fmt: skip
        """Queue a request. ``salt`` is the version whose prefixes it may hit (the current one).

        ``group`` with ``shared``: the first ``shared`` tokens of the prompt are those of every member.
        ``prefix``: only so many tokens of the session's last context begin this prompt (-1: all of them).
        ``urgent`` requests (evaluation) begin before all others. Raises ValueError for what can never run.
        """
        block = self._block
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"request {key!r}: {prompt_tokens} + {output_tokens} tokens, both must be positive"
            )
        if prompt_tokens + output_tokens + block > self._capacity:
            raise ValueError(
                f"request {key!r} of {prompt_tokens} + {output_tokens} tokens can never fit: kv_tokens is "
                f"{self._capacity} and one block of {block} stays free"
            )
        if key in self._keys:
            raise ValueError(f"request {key!r} is here already")
        if self._next <= now:
            self._run(now)
        root = 0
        if group is not None:
            root = (shared if shared < prompt_tokens else prompt_tokens - 1) // block
        request = EngineRequest(
            key, session, prompt_tokens, output_tokens, salt, group, root,
            prompt_tokens if prefix < 0 else prefix, urgent,
        )  # fmt: skip
        self._keys[key] = request
        (self._urgent if urgent else self._waiting).append(request)
        if self._prefill is None and not self._paused:
            self._move(now)
            self._changed()

    def cancel(self, now: float, key: Hashable) -> bool:
        """Withdraw a request; its KV stays cached. False if it is not here (any more)."""
        self._run(now)
        request = self._keys.pop(key, None)
        if request is None:
            return False
        self._move(now)
        if request.state == WAITING:
            (self._urgent if request.urgent else self._waiting).remove(request)
        else:
            self._stop(request, cached=True)
        request.state = OVER
        self._changed()
        return True

    def release(self, now: float, session: Hashable, group: Hashable = None) -> None:
        """The session's task ended or gave up its place: its cached blocks are dropped.

        ``group``: the whole group has ended, its shared prompt goes too unless a member still runs.
        """
        if self._next <= now:
            self._run(now)
        self._cache.drop(session)
        if group is not None:
            self._cache.drop_root(group, self.version)

    def next_event(self) -> float:
        """When ``advance`` will next have something to do, if nothing else happens; inf when never."""
        return self._next if not self._done else self._t

    def advance(self, now: float) -> list[EngineRequest]:
        """Everything that has finished up to ``now``, in order."""
        if self._next <= now:
            self._run(now)
        if not self._done:
            return []
        done, self._done = self._done, []
        return done

    def pause(self, now: float) -> None:
        """Stand still (weights load). No effect if paused already."""
        self._run(now)
        self._move(now)
        self._paused = True
        self._next = inf

    def resume(self, now: float) -> None:
        """Go on."""
        self._move(now)
        self._paused = False
        self._changed()

    def sync(self, now: float, version: int, keep: bool) -> None:
        """The weights are now those of ``version``. Raises ValueError if it goes backwards."""
        if version < self.version:
            raise ValueError(f"version {version} after {self.version}")
        self._run(now)
        self._move(now)
        self.version = version
        back: list[EngineRequest] = []
        if self._prefill is not None:
            back.append(self._prefill)
            self._stop(self._prefill, cached=False)
        if not keep:
            for request in reversed(self._running.copy().values()):
                back.append(request)
                self._stop(request, cached=False)
        for request in back:
            self._requeue(request)
        for queue in (self._urgent, self._waiting):
            for request in queue:
                request.salt = version
        self._cache.clear()
        self._changed()

    def settle(self, now: float) -> None:
        """Bring the counters (busy_s, starved_s, kv_used ...) to ``now``."""
        self._run(now)
        self._move(now)
        self._changed()

    # -- what it tells ------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that decode, or whose prompt is being computed."""
        return len(self._running) + (self._prefill is not None)

    @property
    def waiting(self) -> int:
        """Requests that hold no memory yet."""
        return len(self._waiting) + len(self._urgent)

    @property
    def now(self) -> float:
        """Time up to which the counters stand."""
        return self._t

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._keys

    @property
    def paused(self) -> bool:
        """Between ``pause`` and ``resume``."""
        return self._paused

    @property
    def kv_used(self) -> float:
        """Tokens pinned by running sequences, as of the last event."""
        return self._kv

    def keys(self) -> list[Hashable]:
        """Requests that are here, oldest first."""
        return list(self._keys)

    def waiting_keys(self) -> list[Hashable]:
        """Requests that hold no memory yet, first to run first."""
        return [request.key for queue in (self._urgent, self._waiting) for request in queue]

    def sampled(self, key: Hashable) -> int:
        """Whole tokens that a request has so far, as of the last event; 0 if it is not here."""
        request = self._keys.get(key)
        if request is None:
            return 0
        going = self._n - request.start if request.state == RUNNING else 0.0
        return int(request.made + going + 1e-9)
