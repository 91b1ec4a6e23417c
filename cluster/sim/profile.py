"""Service times of a cluster: what the simulator and the timed twins know of hardware and model.

All times are seconds, all rates tokens per second of one rank, all sizes tokens. A profile is a TOML
file with the sections below; the built-in ones lie beside this module in ``profiles/``.
"""

from cluster.config import Section


class GeneratorProfile(Section, frozen=True):
    """One generator rank. A decode iteration of ``b`` sequences over ``c`` cached tokens takes
    ``step_base_s + b * step_seq_s + c * step_ctx_s``; each sequence gets one token of it."""

    kv_tokens: int  # capacity of the KV cache
    block: int = 16  # tokens per KV block
    max_seqs: int = 256
    prefill_tok_s: float = 20_000.0
    step_base_s: float = 0.012
    step_seq_s: float = 0.0001
    step_ctx_s: float = 2.0e-8
    prefill_share: float = 0.5  # share of the rank that decoding keeps while a prompt is computed


class LearnerProfile(Section, frozen=True):
    """One learner rank; a group of ``n`` ranks is ``n * scaling ** log2(n)`` times as fast."""

    forward_tok_s: float = 30_000.0
    backward_tok_s: float = 15_000.0
    step_fixed_s: float = 0.5  # optimizer, clipping, logging
    scaling: float = 0.97
    micro_tokens: int = 16_384  # tokens of a full micro-batch


class ScorerProfile(Section, frozen=True):
    """A frozen forward pass on one rank."""

    forward_tok_s: float = 35_000.0
    swap_s: float = 2.0  # load it onto (or off) ranks that also train
    passes: int = 1  # 0: the recipe has no scorer


class SyncProfile(Section, frozen=True):
    """The weight-sync barrier."""

    publish_s: float = 0.5
    load_s: float = 1.0  # a generator is paused this long


class SwitchProfile(Section, frozen=True):
    """Seconds that a rank serves nobody while it changes its role."""

    generator_scorer: float = 2.0
    scorer_generator: float = 2.0
    generator_learner: float = 10.0
    learner_generator: float = 12.0


class Profile(Section, frozen=True):
    """All service times of one cluster and model."""

    name: str
    generator: GeneratorProfile
    learner: LearnerProfile = LearnerProfile()
    scorer: ScorerProfile = ScorerProfile()
    sync: SyncProfile = SyncProfile()
    switch: SwitchProfile = SwitchProfile()
    source: str = ""  # where the figures come from
