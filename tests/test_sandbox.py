"""The sandbox, the child program and the pool, against an environment that misbehaves."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EnvConfig
from cluster.errors import ConfigError, EnvFailed, EnvTimeout
from cluster.types import Task
from envs import sandbox
from envs.child import cut_text
from envs.pool import EnvHandle, EnvPool
from envs.registry import EnvBuilder

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).resolve().parent.parent
FAULTY = "tests.faulty_env:Faulty"
# Folders that lead to Python and to this repository exist in the sandbox, empty but for those.
PYTHON = {*Path(sys.prefix).parts, *Path(sys.base_prefix).parts, *ROOT.parts}
TASK = Task(id="t", env=FAULTY, seed=0)


def _bwrap_runs() -> bool:
    try:
        sandbox.probe_bwrap()
    except ConfigError:
        return False
    return True


BWRAP = pytest.param("bwrap", marks=pytest.mark.skipif(not _bwrap_runs(), reason="no user namespaces here"))
backends = pytest.mark.parametrize("backend", [BWRAP, "process"])


def config(backend: str, **changes: Any) -> EnvConfig:
    settings: dict[str, Any] = {"start_timeout_s": 8.0, "step_timeout_s": 8.0, "output_limit": 4096}
    settings["memory_mb"] = 256
    return EnvConfig(name=FAULTY, sandbox=backend, **{**settings, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def opened(
    backend: str, size: int = 2, fresh: bool = False, namespaces: bool = True, **changes: Any
) -> AsyncIterator[EnvPool]:
    pool = EnvPool(EnvBuilder(FAULTY), config(backend, **changes), size, fresh=fresh, namespaces=namespaces)
    async with asyncio.timeout(120):
        await pool.start()
        try:
            yield pool
        finally:
            await pool.close()


@asynccontextmanager
async def episode(pool: EnvPool, seed: int = 0) -> AsyncIterator[EnvHandle]:
    handle = await pool.acquire(5.0)
    try:
        await handle.start(TASK, seed)
        yield handle
    finally:
        await handle.release()


async def say(pool: EnvPool, action: str) -> str:
    async with episode(pool) as handle:
        return (await handle.step([action])).observation


def processes_with(mark: str) -> list[int]:
    """Living processes whose command line or variables name ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # it ended meanwhile
            continue
        if mark.encode() in text and not dead:
            found.append(int(entry.name))
    return found


def descendants(root: int) -> set[int]:
    """All processes below ``root``, zombies included."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
            below.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        children = below.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def ours() -> set[int]:
    """Descendants of this process."""
    return descendants(os.getpid())


async def until_gone(mark: str, limit_s: float) -> list[int]:
    deadline = time.monotonic() + limit_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


async def family(mark: str, count: int) -> int:
    """Processes with ``mark``, once there are ``count``: they fork on after the step that began them."""
    deadline = time.monotonic() + 30.0
    while (found := len(processes_with(mark))) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return found


@backends
async def test_episodes_one_after_the_other_reuse_the_process(backend: str) -> None:
    before = ours()
    async with opened(backend) as pool:
        for seed in range(3):
            async with episode(pool, seed) as handle:
                assert (await handle.step(["echo hello"])).observation == "1 hello"
                assert (await handle.step(["echo again"])).observation == "2 again"
        stats = pool.stats()
        assert (stats.spawned, stats.steps, stats.in_use, stats.idle, stats.failures) == (1, 6, 0, 1, 0)
    assert ours() <= before


@backends
async def test_hang_in_start_and_in_step_ends_that_process_only(backend: str) -> None:
    async with opened(backend, start_timeout_s=3.0, step_timeout_s=0.5) as pool, episode(pool) as healthy:
        handle = await pool.acquire(5.0)
        with pytest.raises(EnvTimeout, match="start took over 3 s"):
            await handle.start(Task(id="t", env=FAULTY, seed=0, data={"start": "sleep 60"}), 0)
        with pytest.raises(EnvFailed, match="failed"):
            await handle.step(["echo"])
        await handle.release()
        for action in ("sleep 60", "spin"):
            begin = time.monotonic()
            with pytest.raises(EnvTimeout, match=r"step took over 0\.5 s"):
                await say(pool, action)
            assert time.monotonic() - begin < 30.0
        assert (await healthy.step(["echo still"])).observation == "1 still"
        assert pool.stats().timeouts == 3


FAILURES = {
    "exit 3": "exit code 3.*last words",
    "segfault": "signal SIGSEGV",
    "raise my bug": r"^ValueError: my bug \(faulty_env.py:\d+\)",
    "quit": "SystemExit: 4",
    "hog": "MemoryError",
    "nothing": "step returned NoneType, not StepResult",
    "reward nan": "reward 'success' is nan",
    "reward inf": "reward 'success' is inf",
    "reward text": "reward 'success' is '1'",
    "reward none": "reward 'success' is None",
    "info 9000000": "exceeds the limit",
}


@backends
async def test_a_failure_is_named_and_the_process_replaced(backend: str) -> None:
    async with opened(backend) as pool, episode(pool) as healthy:
        for count, (action, message) in enumerate(FAILURES.items(), 1):
            with pytest.raises(EnvFailed, match=message):
                await say(pool, action)
            assert await say(pool, "echo fine") == "1 fine"
            assert (await healthy.step(["echo fine"])).observation == f"{count} fine"
            assert (pool.stats().failures, pool.stats().timeouts) == (count, 0)


@backends
@pytest.mark.parametrize("broken", ["raise", "hang"])
async def test_a_constructor_that_fails_is_told_at_the_start(backend: str, broken: str) -> None:
    before = ours()
    limit_s = 1.0 if broken == "hang" else 8.0
    pool = EnvPool(EnvBuilder(FAULTY, {"broken": broken}), config(backend, start_timeout_s=limit_s), 2)
    with pytest.raises(EnvFailed, match="KeyError: 'no such map'" if broken == "raise" else "took over 1 s"):
        await pool.start()
    assert ours() <= before


@backends
async def test_a_module_that_cannot_be_imported_is_told_at_the_start(backend: str) -> None:
    pool = EnvPool(EnvBuilder("no_such_module:Env"), config(backend), 2)
    with pytest.raises(EnvFailed, match="no_such_module:Env: ModuleNotFoundError"):
        await pool.start()
    with pytest.raises(EnvFailed, match="no_such_module"):
        await pool.acquire(5.0)
    await pool.close()


@backends
async def test_huge_output_is_cut_to_head_and_tail(backend: str) -> None:
    async with opened(backend) as pool, episode(pool) as handle:
        text = (await handle.step(["big 50000000"])).observation
        assert len(text.encode()) <= 4096
        assert text.startswith("HEADé") and text.endswith("éTAIL")
        assert handle.cut > 49_000_000 and f"{handle.cut} characters cut" in text
        assert pool.stats().cut == 1


@pytest.mark.parametrize(
    "text", ["", "x" * 128, "é" * 64, "é" * 65, "\ud800" * 50, "a" * 127 + "\U0001f30a" * 9]
)
def test_cut_text_keeps_the_limit(text: str) -> None:
    kept, cut = cut_text(text, 128)
    assert len(kept.encode()) <= 128
    assert (cut == 0) == (len(text.encode("utf-8", "surrogatepass")) <= 128)


@backends
async def test_prints_do_not_meet_the_frames(backend: str) -> None:
    async with opened(backend) as pool:
        assert await say(pool, "print 5000000") == "printed"
        assert await say(pool, "echo next") == "1 next"


@backends
async def test_broken_text_is_mended(backend: str) -> None:
    async with opened(backend) as pool, episode(pool) as handle:
        result = await handle.step(["surrogate"])
        assert result.observation == "a\ufffdb\x00\u202e\U0001f30a"
        assert result.info == {"k\ufffd": ["\ufffd"]} and result.state_key == "\ufffd"
        assert (await handle.step(["echo \ud812!"])).observation == "2 \ufffd!"
        assert (await handle.step(["echo " + "y" * 3000])).observation == "3 " + "y" * 3000
        assert (await handle.step(["reward true"])).rewards == {"success": 1.0}


@backends
async def test_a_request_larger_than_the_socket_buffer_arrives(backend: str) -> None:
    async with opened(backend, output_limit=4 << 20) as pool:
        assert await say(pool, "echo " + "z" * 3_000_000) == "1 " + "z" * 3_000_000


@pytest.mark.parametrize("backend", [BWRAP])
async def test_sandbox_shows_nothing_of_the_host(backend: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with opened(backend) as pool:
            assert (await say(pool, f"connect {port}")).startswith("refused")
            assert (await say(pool, f"read {secret}")).startswith("refused")
            for path in Path(os.path.expanduser("~")), ROOT.parent:
                shown = set((await say(pool, f"read {path}")).split())
                assert not {entry.name for entry in path.iterdir()} & shown - PYTHON
            assert "README" not in await say(pool, f"read {ROOT}")
            for path in (
                secret,
                ROOT / "envs" / "planted.py",
                ROOT / "planted",
                Path("/usr/planted"),
                Path(sys.prefix, "planted"),
                Path("/etc/passwd"),
            ):
                before = path.read_bytes() if path.is_file() else None
                said = await say(pool, f"write {path}")
                # Below /tmp it has a private folder of its own, wherever this repository lies.
                assert said.startswith("refused") or path.is_relative_to("/tmp"), path
                assert (path.read_bytes() if path.is_file() else None) == before, path
            assert (await say(pool, "write /tmp/mine")).startswith("done")
            assert (await say(pool, "fill /tmp/large")).startswith(("refused", "done: 67108864"))
            assert "mine" not in os.listdir("/tmp")
            assert "SECRET" not in await say(pool, "environ")
            assert (await say(pool, "pid")).endswith(" 65534")
    assert secret.read_text() == "hunter2"


async def test_process_backend_inherits_no_variables(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    async with opened("process") as pool:
        assert "SECRET" not in await say(pool, "environ")


@backends
@pytest.mark.parametrize("pauses", [True, False])
async def test_a_pause_stops_the_clock_of_the_environment(backend: str, pauses: bool) -> None:
    made = EnvBuilder("tests.faulty_env:Impatient", {"patience_s": 0.4})
    pool = EnvPool(made, config(backend), 1)
    await pool.start()
    try:
        handle = await pool.acquire(5.0)
        await handle.start(TASK, 0)
        assert (await handle.step(["a"])).observation == "in time"
        if pauses:
            await handle.pause()
            await handle.pause()  # harmless
        await asyncio.sleep(0.6)
        await handle.resume()
        result = await handle.step(["b"])
        assert (result.observation, result.done) == (("in time", False) if pauses else ("too late", True))
        assert pool.stats().pauses == int(pauses)
        await handle.release()
    finally:
        await pool.close()


@backends
async def test_an_environment_that_cannot_pause_is_not_asked(backend: str) -> None:
    async with opened(backend, size=1) as pool, episode(pool) as handle:
        await handle.pause()
        await handle.resume()
        assert (await handle.step(["echo hi"])).observation == "1 hi"
        assert pool.stats().pauses == 0


@pytest.mark.parametrize(("backend", "namespaces"), [("bwrap", True), ("process", True), ("process", False)])
async def test_grandchildren_end_with_the_trajectory(backend: str, namespaces: bool) -> None:
    if backend == "bwrap" and not _bwrap_runs():
        pytest.skip("no user namespaces here")
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    async with opened(backend, namespaces=namespaces, step_timeout_s=20.0) as pool:
        async with episode(pool) as handle:
            await handle.step([f"bomb 3 {mark}"])
            assert await family(mark, 24) == 24
            with pytest.raises(EnvFailed):
                await handle.step(["exit 1"])
        assert await until_gone(mark, 30.0) == []
        if namespaces:  # the same process goes on, its stragglers do not
            async with episode(pool) as handle:
                await handle.step([f"bomb 1 {mark}"])
            assert await until_gone(mark, 30.0) == []
            assert pool.stats().failures == 1
            assert await say(pool, "echo fine") == "1 fine"


@backends
async def test_many_short_episodes_keep_the_process_count_flat(backend: str) -> None:
    async with opened(backend, size=4) as pool:

        async def run(count: int) -> None:
            for seed in range(count):
                async with episode(pool, seed) as handle:
                    await handle.step(["echo"])

        async with episode(pool, 1), episode(pool, 2), episode(pool, 3), episode(pool, 4):
            assert pool.stats().spawned == 4
        before, descriptors = len(ours()), len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(run(40) for _ in range(4)))
        assert len(ours()) == before
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert pool.stats().spawned == 4


@backends
async def test_fifty_crashes_leave_no_zombie_and_no_descriptor(backend: str) -> None:
    async with opened(backend, size=1) as pool:
        before, descriptors = len(ours()), len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            with pytest.raises(EnvFailed):
                await say(pool, "exit 1")
        await say(pool, "echo")
        assert len(ours()) == before
        assert len(os.listdir("/proc/self/fd")) == descriptors


@backends
async def test_process_with_leftover_threads_is_not_used_again(backend: str) -> None:
    async with opened(backend, size=1) as pool:
        await say(pool, "thread")
        assert await say(pool, "echo next") == "1 next"
        assert (pool.stats().spawned, pool.stats().failures) == (2, 0)


@backends
async def test_cancelled_step_ends_the_process_and_frees_the_slot(backend: str) -> None:
    async with opened(backend, size=1, step_timeout_s=20.0) as pool:
        task = asyncio.create_task(say(pool, "sleep 60"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await say(pool, "echo free") == "1 free"


async def test_a_crowd_is_forked_and_cancelled_at_once() -> None:
    async with opened("process", size=40, step_timeout_s=20.0) as pool:
        before = len(ours())
        handles = await asyncio.gather(*(pool.acquire(10.0) for _ in range(40)))
        await asyncio.gather(*(handle.start(TASK, 0) for handle in handles))
        steps = [asyncio.create_task(handle.step(["sleep 60"])) for handle in handles]
        await asyncio.sleep(0.1)
        for step in steps:
            step.cancel()
        ended = await asyncio.gather(*steps, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await asyncio.gather(*(handle.release() for handle in handles))
        assert len(ours()) == before - 1  # the first process was among them
        assert (pool.stats().spawned, pool.stats().in_use, pool.stats().idle) == (40, 0, 0)
        assert await say(pool, "echo next") == "1 next"


@backends
async def test_full_pool_says_so_within_the_deadline(backend: str) -> None:
    async with opened(backend, size=1) as pool, episode(pool):
        with pytest.raises(EnvTimeout, match="size 1"):
            await pool.acquire(0.1)


@backends
async def test_fresh_gives_every_trajectory_its_own_sandbox(backend: str) -> None:
    before = ours()
    async with opened(backend, fresh=True) as pool:
        assert (await say(pool, "write /tmp/springtide-trace" if backend == "bwrap" else "echo")) != ""
        if backend == "bwrap":
            assert (await say(pool, "read /tmp/springtide-trace")).startswith("refused")
        async with episode(pool) as one, episode(pool) as two:
            assert (await one.step(["echo"])).observation == (await two.step(["echo"])).observation
        assert pool.stats().idle == 0 and pool.stats().launches >= 4
    assert ours() <= before


@backends
async def test_lost_sandbox_is_launched_again(backend: str) -> None:
    async with opened(backend) as pool:
        async with episode(pool) as handle:
            zygote = pool._zygote
            assert zygote is not None
            zygote.destroy()
            with pytest.raises(EnvFailed, match="signal SIGKILL"):
                await handle.step(["sleep 9"])
        assert await say(pool, "echo back") == "1 back"
        assert pool.stats().launches == 2


@backends
def test_killed_parent_leaves_nothing(backend: str, tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    script = f"""
import asyncio
from tests import test_sandbox as t
async def main():
    async with t.opened({backend!r}, size=3, step_timeout_s=60.0) as pool:
        async with t.episode(pool) as one, t.episode(pool) as two:
            await one.step(["bomb 1 {mark}"])
            print("up", flush=True)
            await two.step(["sleep 60"])
asyncio.run(main())
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, env=env)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    assert asyncio.run(family(mark, 9)) == 9  # with the parent, whose script has it too
    everything = descendants(parent.pid)
    assert len(everything) >= 10
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=30)
    parent.stdout.close()
    deadline = time.monotonic() + 30.0
    while (left := [pid for pid in everything if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sandbox_that_cannot_run_names_the_way_out(monkeypatch: Any) -> None:
    sandbox.probe_bwrap.cache_clear()
    monkeypatch.setattr(sandbox, "bwrap_binary", lambda: "/bin/false")
    try:
        with pytest.raises(ConfigError, match=r'env\.sandbox = "process"'):
            sandbox.probe_bwrap()
    finally:
        sandbox.probe_bwrap.cache_clear()


def test_run_folders_are_not_among_the_readable_paths() -> None:
    readable = sandbox.readable_paths(EnvBuilder(FAULTY))
    assert str(ROOT) not in readable
    assert {str(ROOT / "envs"), str(ROOT / "cluster"), str(ROOT / "tests")} <= set(readable)
