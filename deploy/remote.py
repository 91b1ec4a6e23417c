"""Ray shell of the controller: turns calls into method calls, and nothing else."""

import asyncio
from typing import Any

import ray

from actors.remote import RemoteGenerator
from cluster import codec
from cluster.config import Config, build
from cluster.controller import Controller
from cluster.messages import EvalEpisode, EvalSummary, Grant, Published, Pull
from cluster.processes import announce, sole
from cluster.stream import RedisQueue
from cluster.trace import Trace
from deploy.paths import RunFolder
from deploy.telemetry import RaySink
from envs.registry import build_tasks

START_DEADLINE_S = 60.0


class ControllerActor:
    """Owns version, epoch, admission and verdicts; see cluster/controller.py for the loops.

    A process that takes its place reads everything back from the queue in ``run``; calls that
    arrive earlier wait for it.
    """

    def __init__(self, tree: dict[str, Any], url: str, folder: str) -> None:
        announce()
        self.config: Config = build(tree)
        self.folder = RunFolder(folder)
        self.url = url
        self._started = asyncio.Event()
        self._controller: Controller | None = None
        self._sink: RaySink | None = None

    @sole
    async def run(self) -> None:
        """Restore and supervise until ``stop``."""
        env = self.config.env
        tasks = build_tasks(env.name, env.params, self.config.run.seed)
        queue = RedisQueue(self.url, prefix=self.config.queue.prefix, run=self.folder.run_id)
        names = [f"generator-{i}" for i in range(self.config.generator.replicas)]
        ports = {name: RemoteGenerator(ray.get_actor(name)) for name in names}
        trace = Trace(self.folder.trace, "controller")
        controller = Controller(self.config, queue, tasks.task, ports, trace)
        try:
            await controller.start()
            self._controller = controller
            self._sink = RaySink({"run": self.config.run.name})
            self._started.set()
            await controller.run()
        finally:
            trace.close()
            await queue.aclose()

    async def _live(self) -> Controller:
        await asyncio.wait_for(self._started.wait(), START_DEADLINE_S)
        assert self._controller is not None
        return self._controller

    async def pull(self, raw: bytes) -> bytes:
        """See ``Controller.pull``; records travel as msgpack."""
        controller = await self._live()
        grant: Grant = await controller.pull(codec.decode(raw, Pull))
        return codec.encode(grant)

    async def publish(self, raw: bytes) -> None:
        """See ``Controller.publish``."""
        await (await self._live()).publish(codec.decode(raw, Published))

    async def closed(self, groups: list[str]) -> None:
        """See ``Controller.closed``."""
        await (await self._live()).closed(groups)

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """See ``Controller.step_facts``."""
        return await (await self._live()).step_facts(record)

    async def measured(self, step: int, metrics: dict[str, Any]) -> None:
        """Export a step's metrics as Ray metrics."""
        await self._live()
        if self._sink is not None:
            self._sink.record(step, metrics)

    async def evaluate(self, suite: str, mode: str, tasks: int, deadline_s: float) -> bytes:
        """See ``Controller.evaluate``; answers an encoded ``EvalSummary``."""
        controller = await self._live()
        summary: EvalSummary = await controller.evaluate(suite, mode, tasks, deadline_s)
        return codec.encode(summary)

    async def report_eval(self, raw: bytes) -> None:
        """See ``Controller.report_eval``."""
        await (await self._live()).report_eval(codec.decode(raw, list[EvalEpisode]))

    async def open_admission(self, is_open: bool) -> None:
        """See ``Controller.open_admission``."""
        await (await self._live()).open_admission(is_open)

    async def status(self) -> dict[str, Any]:
        """See ``Controller.status``."""
        return await (await self._live()).status()

    async def stop(self) -> None:
        """End ``run``."""
        if self._controller is not None:
            await self._controller.stop()


RemoteController = ray.remote(ControllerActor)
