"""One generator rank as a machine in virtual time: prefill, decoding, KV memory, weight updates. Pure.

The simulator drives it with simulated time, the timed twin of a generator with the wall clock; nothing in it
knows the difference.

**Decoding** is processor sharing. With ``b`` sequences over ``c`` cached tokens an iteration takes
``step_base_s + b * step_seq_s + c * step_ctx_s`` and gives each sequence one token, so ``c`` grows by ``b``
an iteration and ``k`` iterations take ``A k + B k^2 / 2`` seconds, ``A = base + b seq + (c - b/2) ctx``,
``B = b ctx``: exactly the sum of the single iterations when ``k`` is whole, and a fluid between them. All
sequences advance together, so one counter ``n`` of iterations since the start serves as virtual time: a
sequence that has ``m`` tokens to go ends when the counter reaches ``n + m``, a constant. A heap of these
constants makes arrivals and departures O(log b), and nothing is touched between events.

**Prefill** is first in, first out, one prompt at a time, ``prefill_tok_s`` tokens a second. While a prompt is
computed and others decode, decoding keeps ``prefill_share`` of the rank and the prompt gets the rest. The end
of a prefill yields the first token.

**Memory**: ``kv_tokens`` hold the contexts of running sequences and, in what is left, the prefix cache
(cluster/sim/kv.py). A prompt begins when it fits beside the running ones. When these outgrow the
memory the youngest is preempted: it goes back to the head of the queue, its blocks to the cache, and what
has been evicted by then is computed again, as vLLM does.

**Weight updates**: ``pause`` and ``resume`` bound the load; ``sync`` sets the version. Prompts without
a token start again under the new salt. Sequences that have tokens keep their KV (``keep``) or are computed
again.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

from cluster.sim.kv import PrefixCache
from cluster.sim.profile import GeneratorProfile

_WAITING, _PREFILL, _RUNNING, _OVER = range(4)


class Done(NamedTuple):
    """A finished request."""

    key: Hashable
    cached_tokens: int  # of the prompt, found in the prefix cache
    t_first: float  # when its first token was sampled
    t_end: float
    first_version: int  # of the weights that sampled the first token
    last_version: int


class _Sequence:
    __slots__ = (
        "cached", "finish", "first_version", "group", "key", "made", "number", "output", "prefix", "prompt",
        "root", "salt", "session", "start", "state", "t_first", "urgent",
    )  # fmt: skip

    def __init__(
        self, key: Hashable, session: Hashable, prompt: int, output: int, salt: int,
        group: Hashable, root: int, prefix: int, urgent: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.session = session
        self.prompt = prompt
        self.output = output
        self.salt = salt
        self.group = group
        self.root = root  # blocks shared with the group
        self.prefix = prefix  # largest hit in tokens
        self.urgent = urgent
        self.state = _WAITING
        self.number = 0  # order of admission: the largest is the youngest
        self.made = 0.0  # tokens sampled before it (last) began to decode
        self.start = 0.0  # the counter then
        self.finish = 0.0  # the counter at its end
        self.cached = -1  # prompt tokens found in the cache at its first prefill
        self.t_first = 0.0
        self.first_version = 0


class GeneratorModel:
    """See the module docstring. Times must not go backwards; every method takes the time now.

    ``advance`` returns what has finished since the last call; the other methods bring the model to ``now``
    first and keep what finishes for the next ``advance``.
    """

    __slots__ = (
        "_base_s", "_block", "_cache", "_capacity", "_ctx", "_ctx_s", "_done", "_heap", "_keys", "_kv",
        "_n", "_next", "_next_k", "_next_kind", "_number", "_paused", "_prefill", "_prefill_left",
        "_prefill_tok_s", "_running", "_seq_s", "_t", "_urgent", "_waiting", "busy_s", "events",
        "max_seqs", "paused_s", "preemptions", "prefilled_tokens", "profile", "recomputed_tokens",
        "share", "starved_s", "version",
    )  # fmt: skip

    def __init__(self, profile: GeneratorProfile, now: float = 0.0, version: int = 0) -> None:
        self.profile = profile
        self.version = version
        self.share = profile.prefill_share
        self._base_s, self._seq_s, self._ctx_s = profile.step_base_s, profile.step_seq_s, profile.step_ctx_s
        self._prefill_tok_s = profile.prefill_tok_s
        self.max_seqs = profile.max_seqs
        self.busy_s = 0.0  # prefilling or decoding
        self.starved_s = 0.0  # nothing to do at all
        self.paused_s = 0.0
        self.preemptions = 0
        self.prefilled_tokens = 0.0  # prompt tokens computed, recomputation included
        self.recomputed_tokens = 0.0  # of which after a preemption or a sync
        self.events = 0  # prefill ends, sequence ends, preemptions
        self._block = profile.block
        self._capacity = profile.kv_tokens
        self._cache = PrefixCache()
        self._keys: dict[Hashable, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._urgent: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # by number: the last is the youngest
        self._heap: list[tuple[float, int, _Sequence]] = []  # (finish, number, sequence), ended ones too
        self._prefill: _Sequence | None = None
        self._prefill_left = 0.0
        self._paused = False
        self._number = 0
        self._t = now
        self._n = 0.0  # iterations since the start
        self._ctx = 0.0  # context tokens of the decoding sequences
        self._kv = 0.0  # pinned tokens: contexts, shared roots once, the prompt being computed
        self._next = inf
        self._next_k = 0.0
        self._next_kind = 0
        self._done: list[Done] = []

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
        root = min(shared, prompt_tokens - 1) // block if group is not None else 0
        sequence = _Sequence(
            key, session, prompt_tokens, output_tokens, salt, group, root,
            prompt_tokens if prefix < 0 else prefix, urgent,
        )  # fmt: skip
        self._keys[key] = sequence
        (self._urgent if urgent else self._waiting).append(sequence)
        if self._prefill is None and not self._paused:
            self._move(now)
            self._changed()

    def cancel(self, now: float, key: Hashable) -> bool:
        """Withdraw a request; its KV stays cached. False if it is not here (any more)."""
        self._run(now)
        sequence = self._keys.pop(key, None)
        if sequence is None:
            return False
        self._move(now)
        if sequence.state == _WAITING:
            (self._urgent if sequence.urgent else self._waiting).remove(sequence)
        else:
            self._stop(sequence, cached=True)
        sequence.state = _OVER
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

    def advance(self, now: float) -> list[Done]:
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
        back: list[_Sequence] = []
        if self._prefill is not None:
            back.append(self._prefill)
            self._stop(self._prefill, cached=False)
        if not keep:
            for sequence in reversed(self._running.copy().values()):
                back.append(sequence)
                self._stop(sequence, cached=False)
        for sequence in back:
            self._requeue(sequence)
        for queue in (self._urgent, self._waiting):
            for sequence in queue:
                sequence.salt = version
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
    def iterations(self) -> float:
        """Decode iterations since the start, as of the last event."""
        return self._n

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

    @property
    def kv_cached(self) -> int:
        """Tokens in the prefix cache beyond the pinned ones, as of the last event."""
        return self._cache.blocks * self._block

    def keys(self) -> list[Hashable]:
        """Requests that are here, oldest first."""
        return list(self._keys)

    def waiting_keys(self) -> list[Hashable]:
        """Requests that hold no memory yet, first to run first."""
        return [sequence.key for queue in (self._urgent, self._waiting) for sequence in queue]

    def sampled(self, key: Hashable) -> int:
        """Whole tokens that a request has so far, as of the last event; 0 if it is not here."""
        sequence = self._keys.get(key)
        if sequence is None:
            return 0
        going = self._n - sequence.start if sequence.state == _RUNNING else 0.0
        return int(sequence.made + going + 1e-9)

    # -- time ---------------------------------------------------------------------------------

    def _run(self, now: float) -> None:
        """Handle every internal event up to ``now``."""
        cache, block = self._cache, self._block
        while self._next <= now:
            self.events += 1
            kind = self._next_kind
            self._move(self._next, self._next_k)
            room = self._capacity - self._kv
            if cache.blocks * block > room + 1e-6:  # the most that was pinned since the last event
                cache.evict(int(room + 1e-6) // block)
            if kind == 0:
                self._prefill_ends()
            elif kind == 1:
                self._sequence_ends()
            else:
                self._preempt()
            self._changed()

    def _move(self, to: float, iterations: float = -1.0) -> None:
        """Let time pass; no event lies between. ``iterations`` if the caller knows how many pass."""
        dt = to - self._t
        if dt <= 0.0:
            if dt < -1e-6:
                raise ValueError(f"time went back from {self._t} to {to}")
            if iterations <= 0.0:
                return
            dt, to = 0.0, self._t
        self._t = to
        b = len(self._running)
        if self._paused:
            self.paused_s += dt
            return
        if not b and self._prefill is None:
            self.starved_s += dt
            return
        self.busy_s += dt
        prefill = self._prefill is not None
        if prefill:
            tokens = dt * self._prefill_tok_s * ((1.0 - self.share) if b else 1.0)
            self._prefill_left -= tokens
        if b:
            k = iterations
            if k < 0.0:
                ctx = self._ctx_s
                a = self._base_s + b * self._seq_s + (self._ctx - 0.5 * b) * ctx
                time = dt * self.share if prefill else dt
                k = 2.0 * time / (a + sqrt(a * a + 2.0 * b * ctx * time))
            self._n += k
            grown = k * b
            self._ctx += grown
            self._kv += grown

    def _replan(self) -> None:
        """When is the next internal event, and which?"""
        b = len(self._running)
        prefill = self._prefill is not None
        self._next = inf
        if self._paused:
            return
        if b:
            heap = self._heap
            while heap[0][2].state != _RUNNING or heap[0][2].number != heap[0][1]:
                heappop(heap)
            k = heap[0][0] - self._n
            kind = 1
            room = (self._capacity - self._kv) / b
            if room < k - 1e-9:  # at a tie the sequence is over before memory is
                k, kind = room, 2
            if k < 0.0:
                k = 0.0
            ctx = self._ctx_s
            a = self._base_s + b * self._seq_s + (self._ctx - 0.5 * b) * ctx
            dt = k * (a + 0.5 * b * ctx * k)
            if not prefill:
                self._next, self._next_k, self._next_kind = self._t + dt, k, kind
                return
            left = self._prefill_left if self._prefill_left > 0.0 else 0.0
            share = self.share
            rest = (1.0 - share) * self._prefill_tok_s
            t_prefill = left / rest if rest > 0.0 else inf
            t_decode = dt / share if share > 0.0 else inf
            if t_decode < t_prefill:
                self._next, self._next_k, self._next_kind = self._t + t_decode, k, kind
            else:
                self._next, self._next_k, self._next_kind = self._t + t_prefill, -1.0, 0
        elif prefill:
            left = self._prefill_left if self._prefill_left > 0.0 else 0.0
            self._next = self._t + left / self._prefill_tok_s
            self._next_k, self._next_kind = -1.0, 0

    def _changed(self) -> None:
        """After any change of state, at time ``_t``: memory, admission, the next event."""
        cache, room = self._cache, self._capacity - self._kv + 1e-6  # rounding must not cost a block
        if cache.blocks * self._block > room:
            cache.evict(int(room) // self._block if room > 0.0 else 0)
        if (self._waiting or self._urgent) and self._prefill is None and not self._paused:
            self._admit()
        self._replan()

    # -- sequences ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin the prompt at the head of the queue, if there is room beside the running ones."""
        queue = self._urgent or self._waiting
        if len(self._running) >= self.max_seqs:
            return
        sequence = queue[0]
        cache, block, salt = self._cache, self._block, sequence.salt
        context = sequence.prompt + sequence.made
        hit = own = new = 0
        root = sequence.root
        if root:
            hit = cache.root(sequence.group, salt)
            if cache.root_pinned(sequence.group, salt):
                root = hit if hit < root else root
            else:
                new = root
        if self._kv + context + (new - root + 1) * block > self._capacity:
            return
        queue.popleft()
        own = cache.take(sequence.session, salt)
        if root:
            sequence.root = root
            hit = hit + own if hit >= root else hit  # a root that lost blocks breaks what follows it
            cache.pin_root(sequence.group, salt, root)
        else:
            hit = own
        self._kv += context + (new - root) * block
        if not sequence.made and hit * block > sequence.prefix:
            hit = sequence.prefix // block
        tokens = min(hit, int(context - 1) // block) * block
        left = context - tokens
        self.prefilled_tokens += left
        if sequence.cached >= 0:
            self.recomputed_tokens += left
        if not sequence.made:
            sequence.cached = tokens
        self._prefill, self._prefill_left = sequence, left
        sequence.state = _PREFILL
        self._number += 1
        sequence.number = self._number
        room = self._capacity - self._kv + 1e-6
        if cache.blocks * block > room:
            cache.evict(int(room) // block if room > 0.0 else 0)

    def _prefill_ends(self) -> None:
        """The first token is there; the sequence decodes, or is over."""
        sequence = self._prefill
        assert sequence is not None
        self._prefill, self._prefill_left = None, 0.0
        if not sequence.made:
            sequence.t_first, sequence.first_version = self._t, self.version
        self._ctx += sequence.prompt + sequence.made
        sequence.made += 1.0
        sequence.start = self._n
        sequence.state = _RUNNING
        number = sequence.number
        self._running[number] = sequence
        left = sequence.output - sequence.made
        if left <= 0.0:
            self._finish(sequence)
            return
        sequence.finish = self._n + left
        heappush(self._heap, (sequence.finish, number, sequence))

    def _sequence_ends(self) -> None:
        """The first of the heap is over: ``_finish`` with what is known of it (the commonest event)."""
        sequence = heappop(self._heap)[2]
        self._n = sequence.finish
        running, block, root, salt = self._running, self._block, sequence.root, sequence.salt
        held = sequence.prompt + sequence.output - 1
        del running[sequence.number]
        blocks = held // block - root
        current = salt == self.version
        if current and blocks > 0:
            self._cache.store(sequence.session, salt, blocks)
        freed = self._cache.unpin_root(sequence.group, salt, current and blocks >= 0) if root else 0
        if running or self._prefill is not None:
            self._ctx -= held
            self._kv -= held + (freed - root) * block
        else:
            self._ctx = self._kv = 0.0  # rounding does not pile up
        sequence.state = _OVER
        del self._keys[sequence.key]
        self._done.append(
            Done(
                sequence.key, sequence.cached, sequence.t_first, self._t, sequence.first_version, self.version
            )
        )

    def _finish(self, sequence: _Sequence) -> None:
        self._stop(sequence, cached=True)
        sequence.state = _OVER
        del self._keys[sequence.key]
        self._done.append(
            Done(
                sequence.key, sequence.cached, sequence.t_first, self._t, sequence.first_version, self.version
            )
        )

    def _preempt(self) -> None:
        """Memory is full: the youngest gives its place up."""
        self.preemptions += 1
        sequence = self._prefill or self._running[next(reversed(self._running))]
        self._stop(sequence, cached=True)
        self._requeue(sequence)

    def _requeue(self, sequence: _Sequence) -> None:
        sequence.state = _WAITING
        (self._urgent if sequence.urgent else self._waiting).appendleft(sequence)

    def _stop(self, sequence: _Sequence, cached: bool) -> None:
        """Take a sequence out of prefill or decoding; its KV goes to the cache or is dropped."""
        cache, block, salt, root = self._cache, self._block, sequence.salt, sequence.root
        if sequence is self._prefill:
            held = sequence.prompt + sequence.made
            computed = held - self._prefill_left
            self.prefilled_tokens -= self._prefill_left
            self._prefill, self._prefill_left = None, 0.0
        else:
            made = self._n - sequence.start
            held = computed = sequence.prompt + sequence.made - 1.0 + made
            sequence.made += made
            del self._running[sequence.number]
            self._ctx -= held
        # Rounded: the counter's last digits must not cost a block.
        whole = int(computed + 1e-6) // block
        cached = cached and salt == self.version
        if cached and whole > root:
            cache.store(sequence.session, salt, whole - root)
        if root:
            freed = cache.unpin_root(sequence.group, salt, cached and whole >= root)
            self._kv -= held + (freed - root) * block
        else:
            self._kv -= held
        if not self._running:
            self._ctx = 0.0  # rounding does not pile up
            if self._prefill is None:
                self._kv = 0.0
