"""A request of a simulated engine, from its arrival to its end."""

from collections.abc import Hashable

from cluster.sim.kv import Root

WAITING, PREFILL, RUNNING, OVER = range(4)


class EngineRequest:
    """One request. What the caller may read of it once it has ended stands first."""

    __slots__ = (
        "cached_tokens", "finish", "first_version", "group", "key", "last_version", "made", "number",
        "output", "pinned", "prefix", "prompt", "root", "salt", "session", "start", "state", "t_end",
        "t_first", "urgent",
    )  # fmt: skip

    def __init__(
        self, key: Hashable, session: Hashable, prompt: int, output: int, salt: int,
        group: Hashable, root: int, prefix: int, urgent: bool,
    ) -> None:  # fmt: skip
        self.key = key
        self.cached_tokens = -1  # of the prompt, found in the prefix cache at its first prefill
        self.t_first = 0.0  # when its first token was sampled
        self.t_end = 0.0
        self.first_version = 0  # of the weights that sampled the first token
        self.last_version = 0

        self.session = session
        self.prompt = prompt
        self.output = output
        self.salt = salt
        self.group = group
        self.root = root  # blocks shared with the group
        self.prefix = prefix  # largest hit in tokens
        self.urgent = urgent
        self.state = WAITING
        self.number = 0  # order of admission: the largest is the youngest
        self.made = 0.0  # tokens sampled before it (last) began to decode
        self.start = 0.0  # the counter of iterations then
        self.finish = 0.0  # the counter at its end
        self.pinned: Root | None = None  # the group's root, while it runs over it
