"""Evaluation suites of a run, before and after training; one that was finished earlier is not repeated."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from cluster import codec
from cluster.config import EvalConfig
from cluster.messages import EvalSummary
from deploy.paths import RunFolder
from deploy.view import View

DEADLINE_S = 1800.0

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the controller."""


class Suites:
    """``results`` has every finished suite by name, such as ``before-greedy``."""

    def __init__(self, config: EvalConfig, folder: RunFolder, view: View, ask: Ask) -> None:
        self.config = config
        self.folder = folder
        self.view = view
        self.ask = ask
        self.results: dict[str, EvalSummary] = {}
        if folder.evaluations.exists():
            for line in folder.evaluations.read_text().splitlines():
                entry = json.loads(line)
                self.results[entry["suite"]] = codec.decode(bytes.fromhex(entry["summary"]), EvalSummary)

    async def run(self, when: str) -> None:
        """Evaluate in every mode that is configured."""
        for mode in self.config.modes:
            suite = f"{when}-{mode}"
            if suite in self.results:
                continue
            with self.view.phase(f"evaluating {self.config.tasks} held-out tasks ({suite})"):
                raw = await self.ask("evaluate", suite, mode, self.config.tasks, DEADLINE_S,
                                     deadline_s=DEADLINE_S + 60)  # fmt: skip
            self.results[suite] = codec.decode(raw, EvalSummary)
            with self.folder.evaluations.open("a") as file:
                file.write(json.dumps({"suite": suite, "summary": raw.hex()}) + "\n")
