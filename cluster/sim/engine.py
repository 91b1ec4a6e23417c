"""How a generator rank passes time: prefill, decoding, KV memory. Pure; what is asked of it: service.py.

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
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from math import inf, sqrt

from cluster.sim.engine_request import OVER, PREFILL, RUNNING, WAITING, EngineRequest
from cluster.sim.kv import PrefixCache
from cluster.sim.profile import GeneratorProfile

_PREFILL_ENDS, _SEQUENCE_ENDS, _MEMORY_FULL = range(3)


class Engine:
    """See the module docstring. Between two events nothing changes but time and what follows from it."""

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
        self._keys: dict[Hashable, EngineRequest] = {}
        self._waiting: deque[EngineRequest] = deque()
        self._urgent: deque[EngineRequest] = deque()
        self._running: dict[int, EngineRequest] = {}  # by number: the last is the youngest
        self._heap: list[tuple[float, int, EngineRequest]] = []  # (finish, number, request), ended ones too
        self._prefill: EngineRequest | None = None
        self._prefill_left = 0.0
        self._paused = False
        self._number = 0
        self._t = now
        self._n = 0.0  # iterations since the start
        self._ctx = 0.0  # context tokens of the decoding sequences
        self._kv = 0.0  # pinned tokens: contexts, shared roots once, the prompt being computed
        self._next = inf
        self._next_k = 0.0
        self._next_kind = _PREFILL_ENDS
        self._done: list[EngineRequest] = []

    # -- time ---------------------------------------------------------------------------------

    def _run(self, now: float) -> None:
        """Handle every internal event up to ``now``."""
        cache, block = self._cache, self._block
        while self._next <= now:
            self.events += 1
            kind = self._next_kind
            self._move(self._next, self._next_k)
            room = self._capacity - self._kv + 1e-6
            if cache.blocks * block > room:  # the most that was pinned since the last event
                cache.evict(int(room) // block)
            if kind == _PREFILL_ENDS:
                self._prefill_ends()
            elif kind == _SEQUENCE_ENDS:
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
            dt = 0.0
        else:
            self._t = to
        if self._paused:
            self.paused_s += dt
            return
        b = len(self._running)
        prefill = self._prefill is not None
        if prefill:
            self._prefill_left -= dt * self._prefill_tok_s * ((1.0 - self.share) if b else 1.0)
        elif not b:
            self.starved_s += dt
            return
        self.busy_s += dt
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

    def _changed(self) -> None:
        """After any change of state, at time ``_t``: memory, admission, the next event."""
        cache, room = self._cache, self._capacity - self._kv + 1e-6  # rounding must not cost a block
        if cache.blocks * self._block > room:
            cache.evict(int(room) // self._block if room > 0.0 else 0)
        if self._paused:
            self._next = inf
            return
        if self._prefill is None and (self._waiting or self._urgent):
            self._admit()
        b = len(self._running)
        if b:
            self._plan_decoding(b)
        elif self._prefill is not None:
            left = self._prefill_left if self._prefill_left > 0.0 else 0.0
            self._next = self._t + left / self._prefill_tok_s
            self._next_k, self._next_kind = -1.0, _PREFILL_ENDS
        else:
            self._next = inf

    def _plan_decoding(self, b: int) -> None:
        """When is the next event, and which, while ``b`` sequences decode?"""
        heap = self._heap
        finish, number, first = heap[0]
        while first.state != RUNNING or first.number != number:
            heappop(heap)
            finish, number, first = heap[0]
        k = finish - self._n
        kind = _SEQUENCE_ENDS
        room = (self._capacity - self._kv) / b
        if room < k - 1e-9:  # at a tie the sequence is over before memory is
            k, kind = room, _MEMORY_FULL
        if k < 0.0:
            k = 0.0
        ctx = self._ctx_s
        a = self._base_s + b * self._seq_s + (self._ctx - 0.5 * b) * ctx
        dt = k * (a + 0.5 * b * ctx * k)
        if self._prefill is None:
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
            self._next, self._next_k, self._next_kind = self._t + t_prefill, -1.0, _PREFILL_ENDS

    # -- sequences ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin the prompt at the head of the queue, if there is room beside the running ones."""
        if len(self._running) >= self.max_seqs:
            return
        queue = self._urgent or self._waiting
        request = queue[0]
        cache, block, salt = self._cache, self._block, request.salt
        context = request.prompt + request.made
        hit = new = 0
        root = request.root
        if root:
            shared = cache.root(request.group, salt)
            hit = shared.blocks if shared is not None else 0
            if shared is None or not shared.pins:
                new = root
            elif hit < root:
                root = hit
        if self._kv + context + (new - root + 1) * block > self._capacity:
            return
        queue.popleft()
        own = cache.take(request.session, salt)
        if root:
            request.root = root
            hit = hit + own if hit >= root else hit  # a root that lost blocks breaks what follows it
            request.pinned = cache.pin_root(request.group, salt, root)
        else:
            hit = own
        self._kv += context + (new - root) * block
        self._begin(request, context, hit)
        room = self._capacity - self._kv + 1e-6
        if cache.blocks * block > room:
            cache.evict(int(room) // block if room > 0.0 else 0)

    def _begin(self, request: EngineRequest, context: float, hit: int) -> None:
        """Compute ``context`` tokens less the ``hit`` blocks that are cached."""
        block = self._block
        if not request.made and hit * block > request.prefix:
            hit = request.prefix // block
        most = int(context - 1) // block
        tokens = (hit if hit < most else most) * block
        left = context - tokens
        self.prefilled_tokens += left
        if request.cached_tokens >= 0:
            self.recomputed_tokens += left
        if not request.made:
            request.cached_tokens = tokens
        self._prefill, self._prefill_left = request, left
        request.state = PREFILL
        self._number += 1
        request.number = self._number

    def _prefill_ends(self) -> None:
        """The first token is there; the sequence decodes, or is over."""
        request = self._prefill
        assert request is not None
        self._prefill, self._prefill_left = None, 0.0
        if not request.made:
            request.t_first, request.first_version = self._t, self.version
        self._ctx += request.prompt + request.made
        request.made += 1.0
        request.start = self._n
        request.state = RUNNING
        number = request.number
        self._running[number] = request
        left = request.output - request.made
        if left <= 0.0:
            self._stop(request, cached=True)
            self._over(request)
            return
        request.finish = self._n + left
        heappush(self._heap, (request.finish, number, request))

    def _sequence_ends(self) -> None:
        """The first of the heap is over: ``_stop`` with what is known of it (the commonest event)."""
        request = heappop(self._heap)[2]
        self._n = request.finish
        running, block, root = self._running, self._block, request.root
        held = request.prompt + request.output - 1
        del running[request.number]
        blocks = held // block - root
        current = request.salt == self.version
        if current and blocks > 0:
            self._cache.store(request.session, request.salt, blocks)
        pinned = request.pinned
        freed = self._cache.unpin(pinned, current and blocks >= 0) if pinned is not None else 0
        if running or self._prefill is not None:
            self._ctx -= held
            self._kv -= held + (freed - root) * block
        else:
            self._ctx = self._kv = 0.0  # rounding does not pile up
        self._over(request)

    def _over(self, request: EngineRequest) -> None:
        request.state = OVER
        request.t_end, request.last_version = self._t, self.version
        del self._keys[request.key]
        self._done.append(request)

    def _preempt(self) -> None:
        """Memory is full: the youngest gives its place up."""
        self.preemptions += 1
        request = self._prefill or self._running[next(reversed(self._running))]
        self._stop(request, cached=True)
        self._requeue(request)

    def _requeue(self, request: EngineRequest) -> None:
        request.state = WAITING
        (self._urgent if request.urgent else self._waiting).appendleft(request)

    def _stop(self, request: EngineRequest, cached: bool) -> None:
        """Take a sequence out of prefill or decoding; its KV goes to the cache or is dropped."""
        cache, block, salt, root = self._cache, self._block, request.salt, request.root
        if request is self._prefill:
            held = request.prompt + request.made
            computed = held - self._prefill_left
            self.prefilled_tokens -= self._prefill_left
            self._prefill, self._prefill_left = None, 0.0
        else:
            made = self._n - request.start
            held = computed = request.prompt + request.made - 1.0 + made
            request.made += made
            del self._running[request.number]
            self._ctx -= held
        # Rounded: the counter's last digits must not cost a block.
        whole = int(computed + 1e-6) // block
        cached = cached and salt == self.version
        if cached and whole > root:
            cache.store(request.session, salt, whole - root)
        if request.pinned is not None:
            freed = cache.unpin(request.pinned, cached and whole >= root)
            request.pinned = None
            self._kv -= held + (freed - root) * block
        else:
            self._kv -= held
        if not self._running:
            self._ctx = 0.0  # rounding does not pile up
            if self._prefill is None:
                self._kv = 0.0
