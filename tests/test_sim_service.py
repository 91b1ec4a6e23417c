"""The virtual-time model of a generator against a slow one that steps through iterations."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sim.engine_request import EngineRequest
from cluster.sim.profile import GeneratorProfile
from cluster.sim.service import GeneratorModel

PLAIN = GeneratorProfile(
    kv_tokens=100_000,
    block=1,
    max_seqs=256,
    prefill_tok_s=1000.0,
    step_base_s=0.01,
    step_seq_s=0.001,
    step_ctx_s=1e-5,
    prefill_share=0.5,
)


def drain(model: GeneratorModel, until: float = math.inf) -> list[EngineRequest]:
    """Let it run dry (or until a time)."""
    done: list[EngineRequest] = []
    while model.next_event() <= until and model.next_event() < math.inf:
        done += model.advance(model.next_event())
    return done


def cached(model: GeneratorModel) -> int:
    """Tokens in the prefix cache beyond the pinned ones."""
    return model._cache.blocks * model.profile.block


def iterations_s(profile: GeneratorProfile, b: int, context: int, steps: int) -> float:
    """Sum of single iterations."""
    return sum(
        profile.step_base_s + b * profile.step_seq_s + (context + i * b) * profile.step_ctx_s
        for i in range(steps)
    )


def test_one_request_takes_the_sum_of_its_iterations() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(2.0, "r", "s", 100, 11, 0)
    (done,) = drain(model)
    assert done.cached_tokens == 0
    assert done.t_first == pytest.approx(2.1)
    assert done.t_end == pytest.approx(2.1 + iterations_s(PLAIN, 1, 100, 10))
    model.settle(10.0)
    assert model.busy_s == pytest.approx(done.t_end - 2.0)
    assert model.starved_s == pytest.approx(10.0 - model.busy_s)
    assert model.kv_used == 0


def test_the_next_turn_hits_what_the_last_one_computed() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(0.0, "r0", "s", 100, 11, 0)
    (first,) = drain(model)
    model.submit(first.t_end + 1, "r1", "s", 150, 2, 0)
    (second,) = drain(model)
    assert second.cached_tokens == 110  # the last sampled token's KV was never computed
    assert second.t_first == pytest.approx(first.t_end + 1 + 40 / 1000)


def test_a_rewritten_history_hits_no_more_than_what_was_kept() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(0.0, "r0", "s", 100, 11, 0)
    drain(model)
    model.submit(9.0, "r1", "s", 150, 2, 0, prefix=70)
    (done,) = drain(model)
    assert done.cached_tokens == 70


def test_members_share_the_first_prompt() -> None:
    model = GeneratorModel(PLAIN)
    for member in range(4):
        model.submit(0.0, member, f"g.{member}", 101, 5, 0, group="g", shared=101)
    done = drain(model)
    assert sorted(d.cached_tokens for d in done) == [0, 100, 100, 100]
    assert model.prefilled_tokens == 101 + 3
    model.settle(100.0)
    assert cached(model) == 100 + 4 * 5  # root, then prompt's last token and four of five per member


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can never fit: kv_tokens is 100000"):
        GeneratorModel(PLAIN).submit(0.0, "r", "s", 99_000, 1_000, 0)


def test_a_salt_of_older_weights_is_never_hit() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(0.0, "r0", "s", 100, 11, 0)
    drain(model)
    model.sync(5.0, 1, keep=True)
    model.submit(5.0, "r1", "s", 150, 2, 1)
    (done,) = drain(model)
    assert (done.cached_tokens, done.first_version, done.last_version) == (0, 1, 1)


def test_in_flight_across_a_sync() -> None:
    ends = {}
    for keep in (True, False):
        model = GeneratorModel(PLAIN)
        model.submit(0.0, "r", "s", 100, 101, 0)
        model.pause(0.5)
        model.sync(0.6, 1, keep)
        assert model.next_event() == math.inf
        model.resume(1.0)
        (done,) = drain(model)
        assert (done.first_version, done.last_version) == (0, 1)
        ends[keep] = done.t_end
        assert model.paused_s == pytest.approx(0.5)
    produced = ends[False] - ends[True]  # the whole context is prefilled again, which yields a token
    assert 0.1 < produced < 0.2


def test_a_prompt_without_a_token_starts_again_under_the_new_weights() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(0.0, "r", "s", 1000, 2, 0)
    model.pause(0.9)
    model.sync(0.9, 1, keep=True)
    model.resume(0.9)
    (done,) = drain(model)
    assert done.first_version == 1
    assert done.t_first == pytest.approx(1.9)


def test_urgent_requests_go_first() -> None:
    model = GeneratorModel(PLAIN)
    for number in range(3):
        model.submit(0.0, number, f"s{number}", 100, 2, 0)
    model.submit(0.0, "eval", "e", 100, 2, 0, urgent=True)
    assert [d.key for d in sorted(drain(model), key=lambda d: d.t_first)] == [0, "eval", 1, 2]


def test_cancelled_requests_leave_nothing_behind() -> None:
    model = GeneratorModel(PLAIN)
    for number in range(3):
        model.submit(0.0, number, f"s{number}", 100, 50, 0)
    assert model.cancel(0.15, 0)  # decodes
    assert model.cancel(0.15, 1)  # is prefilled
    assert model.cancel(0.15, 2)  # waits
    assert not model.cancel(0.15, 2)
    assert model.idle
    assert (model.running, model.waiting, model.kv_used, model.next_event()) == (0, 0, 0, math.inf)
    assert drain(model) == []


def test_time_cannot_go_back() -> None:
    model = GeneratorModel(PLAIN)
    model.submit(5.0, "r", "s", 10, 2, 0)
    with pytest.raises(ValueError, match="time went back"):
        model.cancel(1.0, "r")


@dataclass
class Slow:
    """A fraction of an iteration at a time; the least recently used cache as a plain list."""

    profile: GeneratorProfile
    t: float = 0.0
    waiting: list[dict[str, float]] = field(default_factory=list)
    prefill: dict[str, float] | None = None
    running: list[dict[str, float]] = field(default_factory=list)
    cache: list[list[float]] = field(default_factory=list)  # [session, tokens], oldest first
    ended: dict[float, tuple[float, float, float]] = field(default_factory=dict)
    preemptions: int = 0

    def held(self) -> float:
        return sum(r["context"] for r in self.running) + (self.prefill["context"] if self.prefill else 0.0)

    def shrink(self) -> None:
        room = math.floor(self.profile.kv_tokens - self.held() + 1e-7)
        while sum(entry[1] for entry in self.cache) > room:
            self.cache[0][1] -= 1
            self.cache = [entry for entry in self.cache if entry[1] > 0]

    def keep(self, session: float, tokens: float) -> None:
        self.cache = [entry for entry in self.cache if entry[0] != session]
        if math.floor(tokens + 1e-6):
            self.cache.append([session, math.floor(tokens + 1e-6)])

    def admit(self) -> None:
        if self.prefill is not None or not self.waiting or len(self.running) >= self.profile.max_seqs:
            return
        head = self.waiting[0]
        context = head["prompt"] + head["made"]
        if self.held() + context + 1 > self.profile.kv_tokens + 1e-9:
            return
        self.waiting.pop(0)
        hit = sum(entry[1] for entry in self.cache if entry[0] == head["session"])
        self.cache = [entry for entry in self.cache if entry[0] != head["session"]]
        hit = min(hit, math.floor(context - 1))
        if head["made"] == 0:
            head["cached"] = hit
        head["left"], head["context"] = context - hit, context
        self.prefill = head

    def finish(self, request: dict[str, float]) -> None:
        self.ended[request["key"]] = (request["cached"], request["first"], self.t)
        self.keep(request["session"], request["prompt"] + request["output"] - 1)

    def step(self, until: float) -> None:
        """At most a 32nd of an iteration, and not beyond ``until``."""
        self.shrink()
        self.admit()
        self.shrink()
        p, b = self.profile, len(self.running)
        if not b and self.prefill is None:
            self.t = until
            return
        share = p.prefill_share if self.prefill else 1.0
        dt, part = until - self.t, 0.0
        if self.prefill:
            rate = p.prefill_tok_s * ((1 - p.prefill_share) if b else 1.0)
            dt = min(dt, self.prefill["left"] / rate)
        if b:
            context = sum(r["context"] for r in self.running)
            part = min(1 / 32, *(r["output"] - r["made"] for r in self.running), 1.0)
            part = min(part, max(0.0, (p.kv_tokens - self.held()) / b))

            def seconds(k: float) -> float:
                mean = context - b / 2 + b * k / 2
                return k * (p.step_base_s + b * p.step_seq_s + mean * p.step_ctx_s) / share

            if seconds(part) > dt:
                low, high = 0.0, part
                for _ in range(60):
                    middle = (low + high) / 2
                    low, high = (middle, high) if seconds(middle) < dt else (low, middle)
                part = low
            else:
                dt = seconds(part)
        self.t += dt
        for request in self.running:
            request["made"] += part
            request["context"] += part
        if self.prefill:
            self.prefill["left"] -= dt * rate
            if self.prefill["left"] <= 1e-9:
                request, self.prefill = self.prefill, None
                if request["made"] == 0:
                    request["first"] = self.t
                request["made"] += 1
                self.running.append(request)
        for request in [r for r in self.running if r["made"] >= r["output"] - 1e-9]:
            self.running.remove(request)
            self.finish(request)
        if self.held() >= p.kv_tokens - 1e-7 and (self.running or self.prefill):
            self.preemptions += 1
            victim = self.prefill or self.running[-1]
            if victim is self.prefill:
                self.prefill = None
                self.keep(victim["session"], victim["context"] - victim["left"])
            else:
                self.running.remove(victim)
                self.keep(victim["session"], victim["context"])
            self.waiting.insert(0, victim)


Arrival = tuple[float, int, int, int]
arrivals = st.lists(
    st.tuples(st.floats(0.0, 1.5), st.integers(0, 3), st.integers(1, 60), st.integers(1, 25)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals,
    st.sampled_from([100, 130, 200, 5000]),
    st.sampled_from([1, 3, 256]),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
)
def test_like_the_slow_model(todo: list[Arrival], memory: int, seqs: int, share: float) -> None:
    profile = GeneratorProfile(
        kv_tokens=memory, block=1, max_seqs=seqs, prefill_tok_s=300.0, step_base_s=0.01,
        step_seq_s=0.002, step_ctx_s=1e-4, prefill_share=share,
    )  # fmt: skip
    fast, slow = GeneratorModel(profile), Slow(profile)
    ended: dict[object, EngineRequest] = {}
    for number, (at, session, prompt, output) in enumerate(sorted(todo)):
        while slow.t < at:
            slow.step(at)
        slow.shrink()
        slow.waiting.append(
            {"key": number, "session": session, "prompt": prompt, "output": output, "made": 0.0, "cached": -1}
        )
        slow.admit()
        slow.shrink()
        fast.submit(at, number, session, prompt, output, 0)
        ended |= {done.key: done for done in fast.advance(at)}
    ended |= {done.key: done for done in drain(fast)}
    while len(slow.ended) < len(todo):
        slow.step(slow.t + 1.0)
    assert fast.preemptions == slow.preemptions
    for number in range(len(todo)):
        cached, first, end = slow.ended[number]
        assert ended[number].cached_tokens == cached
        assert ended[number].t_first == pytest.approx(first, abs=2e-4)
        assert ended[number].t_end == pytest.approx(end, abs=2e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from("snckpu"), st.integers(0, 5)), max_size=40),
    st.sampled_from([160, 400]),
)
def test_memory_never_overflows_and_everything_ends(todo: list[tuple[float, str, int]], memory: int) -> None:
    profile = GeneratorProfile(kv_tokens=memory, block=16, prefill_tok_s=200.0, step_base_s=0.01)
    model = GeneratorModel(profile)
    submitted, over, paused = 0, set(), False
    for at, what, who in sorted(todo):
        over |= {done.key for done in model.advance(at)}
        if what in "su":
            group, urgent = f"g{who % 2}", what == "u"
            model.submit(
                at, submitted, who, 40 + 8 * who, 30, model.version, group=group, shared=40, urgent=urgent
            )
            submitted += 1
        elif what == "c" and submitted and model.cancel(at, who % submitted):
            over.add(who % submitted)
        elif what in "nk":
            model.sync(at, model.version + 1, keep=what == "k")
        elif what == "p":
            paused = not paused
            (model.pause if paused else model.resume)(at)
        model.settle(at)
        assert 0 <= model.kv_used <= memory + 1e-5
        assert model.kv_used + cached(model) <= memory + 1e-5
    if paused:
        model.resume(3.0)
    over |= {done.key for done in drain(model)}
    assert over == set(range(submitted))
    assert model.idle
    assert model.kv_used == 0
