"""Ray shell of the controller: turns calls into method calls, and nothing else."""

import asyncio
import os
import traceback
from typing import Any

import ray

from actors.remote import RemoteGenerator
from cluster import codec
from cluster.config import Config, build
from cluster.controller import Controller
from cluster.messages import EvalEpisode, EvalSummary, Grant, Moved, Published, Pull, RankRow
from cluster.processes import announce, sole
from cluster.sim.catalogue import load_profile
from cluster.sim.profile import SwitchProfile
from cluster.stream import RedisQueue
from cluster.targets import switch_costs
from cluster.trace import Trace
from deploy.paths import RunFolder
from deploy.telemetry import RaySink
from envs.registry import build_tasks

START_DEADLINE_S = 60.0


class ControllerActor:
    """Owns version, epoch, admission and verdicts; see cluster/controller.py for the loops.

    A process that takes its place reads everything back from the queue in ``run``; calls that
    arrive earlier wait for it. ``session`` differs for every driver: roles that another driver's actors
    held are not taken over.
    """

    def __init__(self, tree: dict[str, Any], url: str, folder: str, session: str = "") -> None:
        announce()
        self.config: Config = build(tree)
        self.folder = RunFolder(folder)
        self.url = url
        self.session = session
        self._started = asyncio.Event()
        self._controller: Controller | None = None
        self._sink: RaySink | None = None
        self._there: set[str] = set()  # actors that answer, by the driver's word

    @sole
    async def run(self) -> None:
        """Restore and supervise until ``stop``; what goes wrong after the start ends the process.

        Calls in flight end with it, and their callers ask the next one: here they would go on with a
        controller that has ended.
        """
        env = self.config.env
        tasks = build_tasks(env.name, env.params, self.config.run.seed)
        queue = RedisQueue(self.url, prefix=self.config.queue.prefix, run=self.folder.run_id)
        trace = Trace(self.folder.trace, "controller")
        controller = Controller(
            self.config, queue, tasks.task, generator_port, trace, self._ready, switch_priors(self.config)
        )
        try:
            await controller.start(self.session)
            self._controller = controller
            self._sink = RaySink({"run": self.config.run.name})
            self._started.set()
            await controller.run()
        except Exception as error:
            if self._controller is not None:  # it has answered calls: no other may in this process
                trace("controller_failed", {"error": repr(error)[:500]})
                traceback.print_exc()
                trace.close()
                os._exit(1)
            raise
        finally:
            trace.close()
            await queue.aclose()

    async def _live(self) -> Controller:
        async with asyncio.timeout(START_DEADLINE_S):
            await self._started.wait()
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

    async def barrier(self, facts: dict[str, Any]) -> bytes:
        """See ``Controller.barrier``; answers an encoded ``Barrier``."""
        return codec.encode(await (await self._live()).barrier(facts))

    async def moved(self, raw: bytes) -> None:
        """See ``Controller.moved``."""
        await (await self._live()).moved(codec.decode(raw, Moved))

    async def roles(self) -> bytes:
        """Encoded ``Roles``."""
        return codec.encode(await (await self._live()).roles())

    async def wanted(self) -> bytes:
        """Encoded ``Wanted``."""
        return codec.encode(await (await self._live()).wanted())

    async def have(self, names: list[str], free: int | None = None) -> None:
        """See ``Controller.have``."""
        self._there = set(names)
        await (await self._live()).have(names, free)

    async def located(self, nodes: dict[int, str]) -> None:
        """See ``Controller.located``."""
        await (await self._live()).located(nodes)

    async def ranks_lost(self, ranks: list[int], node: str = "") -> None:
        """See ``Controller.ranks_lost``."""
        await (await self._live()).ranks_lost(ranks, node)

    async def ranks_joined(self, raw: bytes) -> None:
        """See ``Controller.ranks_joined``; a list of ``RankRow``, encoded."""
        await (await self._live()).ranks_joined(codec.decode(raw, list[RankRow]))

    async def scale(self, **counts: int | None) -> dict[str, Any]:
        """See ``Controller.scale``. Raises ConfigError."""
        return await (await self._live()).scale(**counts)

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        """See ``Controller.step_facts``."""
        return await (await self._live()).step_facts(record)

    async def measured(self, step: int, metrics: dict[str, Any]) -> None:
        """See ``Controller.measured``; exported as Ray metrics too."""
        (await self._live()).measured(step, metrics)
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

    async def _ready(self, name: str) -> bool:
        """An actor can take up its role: a generator's engine runs, a learner or scorer has answered.

        The driver lists those when they have: a handle of theirs would import torch into this process.
        """
        if name.startswith("generator-"):
            return (await generator_port(name).health()).ready
        return name in self._there

    async def stop(self) -> None:
        """End ``run``."""
        if self._controller is not None:
            await self._controller.stop()


def generator_port(name: str) -> RemoteGenerator:
    """Raises ValueError while there is no actor of that name."""
    return RemoteGenerator(ray.get_actor(name))


def switch_priors(config: Config) -> dict[str, float]:
    """Expected seconds of moves until some were measured: a twin's profile knows them."""
    if not config.twin.profile:
        return switch_costs(config, SwitchProfile())
    return switch_costs(config, load_profile(config.twin.profile).switch, config.twin.speed)


RemoteController = ray.remote(ControllerActor)
