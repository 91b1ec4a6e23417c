"""Whole jobs for tests: a tiny model, a recipe, the command line as a child process, its files.

::

    job = Job(tmp_path, steps=20, **{"env.latency": {"mean_s": 0.05, "sigma": 0.5}})
    with job.running():
        job.wait_for(lambda: job.version() >= 5, 120.0)
        job.processes()["worker-0"].kill()
        assert job.wait(300.0) == 0
    assert job.summary()["ledger"]["balanced"]
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.config import load
from cluster.metrics import read_steps
from cluster.processes import living
from cluster.stream import RedisQueue
from cluster.trace import read_trace
from cluster.types import Ledger, StepRecord
from cluster.valkey import ValkeyServer
from deploy.paths import RunFolder

REPO = Path(__file__).resolve().parent.parent
MARK = "SPRINGTIDE_TEST_JOB"  # an environment variable that the job's processes inherit
SPECIAL = ["<pad>", "<unk>", "<u>", "<a>", "<end>"]
WORDS = "higher lower guess right wrong a number between and the is too high low try again you have turns"
TEMPLATE = (
    "{% for m in messages %}{% if m['role']=='user' %}<u> {{ m['content'] }} "
    "{% else %}<a> {{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
COIN: dict[str, Any] = {
    "run": {"name": "job", "groups_per_step": 4, "group_size": 4, "max_lag": 2, "checkpoint_every": 5},
    "env": {"name": "coin", "max_turns": 6, "slots": 16, "params": {"most": 20}},
    "harness": {"max_context": 256, "max_new_tokens": 4},
    "generator": {"kv_cache_gb": 0.25},
    "learner": {"lr": 1e-3, "row_tokens": 256},
    "cluster": {"dashboard": False, "object_store_mb": 128},
}


def make_player(folder: Path) -> Path:
    """A random two-layer model whose tokenizer knows the words of the ``coin`` environment."""
    words = list(dict.fromkeys([*SPECIAL, *map(str, range(32)), *WORDS.split()]))
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        eos_token_id=words.index("<end>"), pad_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(folder)
    return folder


class Job:
    """One run folder and the driver processes that work on it, one after the other."""

    def __init__(self, root: Path, steps: int, model: Path | None = None, **settings: Any) -> None:
        """``settings`` are overrides of ``COIN`` by dotted key, values as they are."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        tree = json.loads(json.dumps(COIN))
        path = model or make_player(root / "model")
        base = {"run.root": str(root / "runs"), "run.steps": steps, "model.path": str(path)}
        for key, value in (base | settings).items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        self.recipe = root / "recipe.toml"
        self.recipe.write_text(to_toml(tree))
        self.config = load(self.recipe)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = root / "log.txt"
        self._seen: set[psutil.Process] = set()

    # -- the driver ---------------------------------------------------------------------

    def start(self) -> None:
        """Start it, or resume the run that exists."""
        folder = self._folders()
        words = ["--resume", str(folder[0])] if folder else [str(self.recipe)]
        environment = dict(
            os.environ, PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", **{MARK: str(self.root)}
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "train", *words],
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whoever runs the tests in the background may have SIGINT ignored, which children inherit.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    @contextmanager
    def running(self) -> Iterator["Job"]:
        """Started, and ended with everything below it, whatever happens."""
        self.start()
        try:
            yield self
        finally:
            self.end()

    def wait(self, timeout_s: float) -> int:
        """The driver's exit code; fails the test when it takes longer."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job has not ended within {timeout_s:.0f} s\n{self.tail()}")

    def kill(self) -> float:
        """SIGKILL of the driver; returns when that was."""
        assert self.process is not None
        self.remains()
        self.process.kill()
        self.process.wait()
        return time.monotonic()

    def end(self) -> None:
        """Interrupt the driver; whatever is left after that is killed."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.remains():
            with suppress(psutil.NoSuchProcess):  # it has just ended by itself
                process.kill()

    def tail(self, lines: int = 40) -> str:
        """The end of what the driver printed and of the trace."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([*text, *map(str, self.trace()[-lines:])])

    # -- its processes ------------------------------------------------------------------

    def processes(self) -> dict[str, psutil.Process]:
        """Living processes by component name."""
        return living(self.folder.pids) if self._folders() else {}

    def remains(self) -> list[psutil.Process]:
        """Every living process of this job: by its environment, its ancestors, or seen before.

        Environment processes live in a sandbox without our variables; they are found below their
        workers, and remembered when a worker was killed (so ask before killing).
        """
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root) and process.pid != os.getpid():
                    self._seen.add(process)
            except (psutil.Error, OSError):
                continue
        for process in list(self._seen):
            try:
                self._seen.update(process.children(recursive=True))
            except psutil.Error:
                continue
        self._seen = {process for process in self._seen if lives(process)}
        return sorted(self._seen, key=lambda process: int(process.pid))

    def gone(self, timeout_s: float) -> None:
        """Wait until no process of the job is left; fails after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while left := self.remains():
            if time.monotonic() > deadline:
                pytest.fail(f"still there after {timeout_s:.0f} s: {[told(p) for p in left]}")
            time.sleep(0.2)

    # -- its files ----------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        return [path.parent for path in sorted((self.root / "runs").glob("*/config.json"))]

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self._folders()[0])

    def trace(self, *events: str) -> list[dict[str, Any]]:
        """Events so far, all or of the kinds given."""
        if not self._folders() or not self.folder.trace.exists():
            return []
        return [e for e in read_trace(self.folder.trace) if not events or e["event"] in events]

    def version(self) -> int:
        """Committed optimizer steps, by the trace."""
        return max((int(e["step"]) for e in self.trace("trained")), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        return read_steps(self.folder.metrics)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.folder.summary.read_text())
        return summary

    async def books(self) -> tuple[Ledger, Ledger, list[StepRecord]]:
        """Ledger, audit and step log, read from the queue's files after the job."""
        server = ValkeyServer(self.folder.queue)
        server.start()
        try:
            queue = RedisQueue(server.url, self.config.queue.prefix, self.folder.run_id)
            try:
                return await queue.ledger(), await queue.audit(), await queue.steps(0)
            finally:
                await queue.aclose()
        finally:
            server.stop()

    def wait_for(
        self, condition: Callable[[], Any], timeout_s: float, what: str = "", poll_s: float = 0.2
    ) -> Any:
        """Poll until ``condition`` holds; fails when the driver ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process is not None
            if self.process.poll() is not None:
                pytest.fail(f"the driver ended with {self.process.returncode} {what}\n{self.tail()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:.0f} s: {what}\n{self.tail()}")
            time.sleep(poll_s)
        return value


def scale(job: Job, *words: str, code: int = 0) -> str:
    """``springtide scale`` on the running job, to its end; returns what it printed once connected."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "deploy.cli", "scale", str(job.folder.path), *words],
        cwd=REPO, env=dict(os.environ, PYTHONPATH=str(REPO)), text=True, timeout=300,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{done.stdout}\n{job.tail()}"
    sys.stdout.write(done.stdout)
    greeting, _, said = done.stdout.partition("\n")
    assert greeting == f"connecting to {job.folder.path.name} ..."
    return said


def told(process: psutil.Process) -> tuple[int, str, list[str]]:
    """Process id, name and first words of a process that may end at any moment."""
    try:
        return process.pid, process.name(), process.cmdline()[:4]
    except psutil.Error:
        return process.pid, "has ended", []


def lives(process: psutil.Process) -> bool:
    """Running, and not only a zombie that waits for its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def to_toml(tree: dict[str, Any], head: str = "") -> str:
    """A tree of plain values as TOML."""
    plain = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    text = f"[{head}]\n" if head else ""
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in plain.items())
    for key, value in tree.items():
        if isinstance(value, dict):
            text += to_toml(value, f"{head}.{key}" if head else key)
    return text
