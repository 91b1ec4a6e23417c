"""An environment that misbehaves on request, for the tests of the pool."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster.types import Task
from envs.base import Env, StepResult, TaskSet


def answer(text: str = "ok", rewards: dict[str, Any] | None = None) -> StepResult:
    """A step result that does not end the episode."""
    return StepResult(text, rewards=rewards or {})


def _attempt(action: Callable[[], object]) -> str:
    try:
        return f"done: {action()}"
    except OSError as error:
        return f"refused: {type(error).__name__}"


def _read(path: str) -> str:
    if os.path.isdir(path):
        return " ".join(sorted(os.listdir(path)))
    with open(path) as file:
        return file.read()


def _write(path: str) -> int:
    with open(path, "w") as file:
        return file.write("mark")


class Faulty(Env):
    """An action is a word and its argument: ``sleep 60``, ``exit 3``, ``print 5000000`` ..."""

    def __init__(self, broken: str = "") -> None:
        if broken == "raise":
            raise KeyError("no such map")
        if broken == "hang":
            time.sleep(60)

    def start(self, task: Task, seed: int) -> str:
        """``task.data["start"]`` is an action too."""
        self.seed, self.turns = seed, 0
        begin = task.data.get("start", "")
        return self.step([begin]).observation if begin else f"seed {seed}"

    def step(self, actions: list[str]) -> StepResult:
        """Do what the action says."""
        word, _, rest = actions[0].partition(" ")
        self.turns += 1
        action: Callable[[str], StepResult] = getattr(self, f"do_{word}", self.do_echo)
        return action(rest)

    def close(self) -> None:
        """Says so, for the test of the output pipe."""
        os.write(1, b"closed\n")

    def do_echo(self, rest: str) -> StepResult:
        """Answer with the argument."""
        return answer(f"{self.turns} {rest}")

    def do_pid(self, rest: str) -> StepResult:
        """Which process this is, as the sandbox numbers it, and its user."""
        return answer(f"{os.getpid()} {os.getuid()}")

    def do_sleep(self, rest: str) -> StepResult:
        """Hang, ignoring every polite signal."""
        time.sleep(float(rest))
        return answer()

    def do_spin(self, rest: str) -> StepResult:
        """Hang without ever sleeping."""
        while True:
            self.turns += 1

    def do_exit(self, rest: str) -> StepResult:
        """Die at once."""
        os.write(2, b"last words\n")
        os._exit(int(rest))

    def do_segfault(self, rest: str) -> StepResult:
        """Die by a signal."""
        ctypes.string_at(0)
        return answer()

    def do_raise(self, rest: str) -> StepResult:
        """An ordinary bug."""
        raise ValueError(rest)

    def do_quit(self, rest: str) -> StepResult:
        """A library that thinks it owns the process."""
        sys.exit(4)

    def do_hog(self, rest: str) -> StepResult:
        """Ask for more memory than there is."""
        blocks = [bytearray(1 << 24) for _ in range(4096)]
        return answer(str(len(blocks)))

    def do_big(self, rest: str) -> StepResult:
        """A huge observation with a recognisable head and tail."""
        return answer("HEAD" + "é" * int(rest) + "TAIL")

    def do_info(self, rest: str) -> StepResult:
        """Huge, where nothing is cut."""
        return StepResult("ok", info={"log": "x" * int(rest)})

    def do_print(self, rest: str) -> StepResult:
        """Flood both outputs, through Python and past it."""
        print("p" * int(rest))  # noqa: T201  a library that prints
        subprocess.run(["/bin/echo", "from a program"], check=True)
        os.write(1, b"raw\n")
        os.write(2, b"raw\n")
        return answer("printed")

    def do_surrogate(self, rest: str) -> StepResult:
        """Half a character, NUL, right to left and four-byte text."""
        return StepResult("a\ud800b\x00\u202e\U0001f30a", info={"k\udfff": ["\ud900"]}, state_key="\udc00")

    def do_reward(self, rest: str) -> StepResult:
        """A reward of a wrong kind."""
        nan, inf = float("nan"), float("inf")
        values: dict[str, Any] = {"nan": nan, "inf": inf, "text": "1", "none": None, "true": True}
        return answer("rewarded", {"success": values[rest]})

    def do_nothing(self, rest: str) -> StepResult:
        """Forget the result."""
        return None  # type: ignore[return-value]

    def do_connect(self, rest: str) -> StepResult:
        """Reach a port of the host."""
        return answer(_attempt(lambda: socket.create_connection(("127.0.0.1", int(rest)), timeout=2)))

    def do_read(self, rest: str) -> StepResult:
        """Read a file or list a folder."""
        return answer(_attempt(lambda: _read(rest)))

    def do_write(self, rest: str) -> StepResult:
        """Write a file."""
        return answer(_attempt(lambda: _write(rest)))

    def do_fill(self, rest: str) -> StepResult:
        """Write a file that is too large."""
        return answer(_attempt(lambda: os.write(os.open(rest, os.O_CREAT | os.O_WRONLY), bytes(100 << 20))))

    def do_bomb(self, rest: str) -> StepResult:
        """Leave a family of daemons behind, each named by the argument."""
        count, mark = rest.split()
        fork = "for _ in range(3): os.fork()\nif os.getpgrp() != os.getpid(): os.setsid()\n"
        script = f"import os, time\n{fork}time.sleep(99)"
        for _ in range(int(count)):
            subprocess.Popen([sys.executable, "-S", "-c", script, mark], start_new_session=True)
        time.sleep(0.3)
        return answer("left")

    def do_thread(self, rest: str) -> StepResult:
        """A thread that never ends."""
        threading.Thread(target=time.sleep, args=(99,)).start()
        return answer("left")

    def do_environ(self, rest: str) -> StepResult:
        """What the process inherited."""
        return answer(" ".join(sorted(os.environ)))


class Impatient(Env):
    """Ends the episode when its player is silent for ``patience_s``, not counting pauses."""

    capabilities = frozenset({"pause"})

    def __init__(self, patience_s: float = 0.3) -> None:
        self.patience_s = patience_s

    def start(self, task: Task, seed: int) -> str:
        """The clock runs from here."""
        self.since = time.monotonic()
        self.paused_at = 0.0
        return "go on"

    def step(self, actions: list[str]) -> StepResult:
        """Refuse a late action."""
        late = time.monotonic() - self.since > self.patience_s
        self.since = time.monotonic()
        if self.paused_at:
            raise RuntimeError("a step while paused")
        return StepResult("too late" if late else "in time", done=late)

    def pause(self) -> None:
        """Stop the clock."""
        self.paused_at = time.monotonic()

    def resume(self) -> None:
        """Let it run on."""
        self.since += time.monotonic() - self.paused_at
        self.paused_at = 0.0


class FaultyTasks(TaskSet):
    """One task per index."""

    def task(self, split: str, index: int) -> Task:
        """Nothing in it."""
        return Task(id=f"{split}-{index}", env="tests.faulty_env:Faulty", seed=index)

    def fingerprint(self) -> str:
        """Constant."""
        return "faulty-1"
