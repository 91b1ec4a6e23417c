"""Bad input: one clear line on stderr within seconds, a non-zero exit code, and nothing left behind.

The command runs as a process of its own in a session of its own, marked by an environment variable
that everything it starts inherits. Whatever can be known before Ray and the engines start is said
before they start, so most cases cost little more than imports.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config import dump, load
from cluster.valkey import ValkeyServer
from learner.manifest import MANIFEST, digest
from tests.jobs import COIN, make_player, to_toml

REPO = Path(__file__).resolve().parent.parent
MARK = "SPRINGTIDE_TEST_MARK"
CANNOT = "this cannot change within a run; start a new one"
FAST_S = 60.0  # a deadline that a crowded machine keeps too; idle, these cases take one to four seconds
BAD_ENVIRONMENTS = '''
from envs.base import Env, StepResult, TaskSet
from cluster.types import Task


class Play(Env):
    def start(self, task, seed):
        return "guess a number"

    def step(self, actions):
        return StepResult("right", rewards={"success": 1.0}, done=True)


class PlayTasks(TaskSet):
    def task(self, split, index):
        return Task(id=f"{split}-{index}", env="bad", seed=index)

    def fingerprint(self):
        return "bad-1"


class NoMap(Play):
    def __init__(self):
        raise KeyError("no such map")


class NoStart(Play):
    def start(self, task, seed):
        raise RuntimeError("the level file is missing")


class LateStart(Play):
    """Only the rehearsal succeeds: every task after the first few fails."""

    def start(self, task, seed):
        if seed > 0:
            raise RuntimeError("the licence server is gone")
        return super().start(task, seed)


class Lone(Play):
    """Its task set has been forgotten."""


NoMapTasks = NoStartTasks = LateStartTasks = PlayTasks
'''


class Outcome:
    """What a command printed, how it ended, how long it took, and who outlived it."""

    def __init__(self, words: list[str], folder: Path, limit_s: float = FAST_S) -> None:
        mark = uuid.uuid4().hex
        environment = dict(
            os.environ, PYTHONPATH=f"{REPO}{os.pathsep}{folder}", OMP_NUM_THREADS="1", **{MARK: mark}
        )
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *words],
            cwd=REPO, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            self.stdout, self.stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            for survivor in marked(mark):
                survivor.kill()
            self.stdout, self.stderr = process.communicate()
            pytest.fail(f"no end within {limit_s:.0f} s:\n{self.stdout}\n{self.stderr}")
        self.seconds = time.monotonic() - began
        self.code = process.returncode
        self.survivors = [f"{p.pid} {p.name()}" for p in marked(mark)]

    def line(self) -> str:
        """The one line of an error; fails if there is anything but that."""
        assert self.code == 2, f"exit code {self.code}:\n{self.stdout}\n{self.stderr}"
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1, f"not one line:\n{self.stderr}"
        assert lines[0].startswith("springtide: "), lines[0]
        assert not self.survivors, f"still there: {self.survivors}"
        sys.stdout.write(f"{self.seconds:5.1f} s  {lines[0]}\n")
        return lines[0]


def marked(mark: str) -> list[psutil.Process]:
    """Living processes whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_player(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad_environments.py").write_text(BAD_ENVIRONMENTS)
    return tmp_path


@pytest.fixture
def recipe(folder: Path, model: Path) -> Path:
    """A recipe with nothing wrong."""
    tree = json.loads(json.dumps(COIN))
    tree["run"] |= {"root": str(folder / "runs"), "steps": 1}
    tree["model"] = {"path": str(model)}
    path = folder / "recipe.toml"
    path.write_text(to_toml(tree))
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that somebody listens at, and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_manifest(checkpoint: Path) -> None:
    """Checksums of all files as they are now."""
    files = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}))


def train(recipe: Path, *overrides: str) -> Outcome:
    return Outcome(["train", str(recipe), *overrides], recipe.parent)


# -- the recipe -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.stepz=3"], "config: unknown key run.stepz (did you mean 'steps'?)"),
        (["lerner.lr=1"], "config: unknown key lerner (did you mean 'learner'?)"),
        (["run.steps"], "config: override 'run.steps' is not of the form section.key=value"),
        (["run.steps=many"], "config: run.steps: Expected `int`, got `str`"),
        (["run=3"], "config: run is a section, not a value (3)"),
        (["run.max_lag=-1"], "config: run.max_lag = -1: must be 0 (synchronous) or more"),
        (["scorer.replicas=1"], "config: scorer.replicas > 0 does nothing while objective.kl_coef is 0"),
        (["objective.kl_coef=0.1"], "config: objective.kl_coef > 0 needs scorer.replicas >= 1"),
        (["model.maker=tiny"], "config: model needs exactly one of model.path (a folder) and model.maker"),
        (["model.path=", "model.maker=tyni"], "config: model.maker = 'tyni' is unknown (did you mean 'tiny'"),
        (["model.path=/nowhere"], "config: model.path = '/nowhere': no such folder"),
        (["env.name=coins"], "config: env.name = 'coins' is unknown (did you mean 'coin'?)"),
        (["env.name=nothere:Env"], "config: env.name: cannot load nothere:Env: ModuleNotFoundError: "
         "No module named 'nothere' (put nothere.py beside the recipe, into the current folder or on "
         "PYTHONPATH)"),
        (["env.name=bad_environments:Play"],
         "config: env.params.most is unknown (bad_environments:Play takes no parameters)"),
        (["env.name=bad_environments:Lone", "env.params={}"],
         "config: env.name: cannot load bad_environments:LoneTasks: AttributeError: module "
         "'bad_environments' has no attribute 'LoneTasks' (an environment bad_environments:Lone needs its "
         "task set, bad_environments:LoneTasks, beside it)"),
        (["env.params.most=many"], "config: env.params.most = 'many': Expected `int`, got `str`"),
        (["env.folder=/nowhere"], "config: env.folder is unused unless env.name is module:Class"),
        (["model.path=", "model.maker=tiny", "model.params.hiden=32"],
         "config: model.params.hiden is unknown (did you mean 'hidden'?)"),
        (["model.path=", "model.maker=tiny", "model.params.hidden=wide"],
         "config: model.params.hidden = 'wide': Expected `int`, got `str`"),
        (["model.path=", "model.maker=tiny", "model.params.hidden=33"],
         "config: making the model (tiny) failed: model.params.hidden = 33: must be a multiple of 32"),
        (["steps=5"], "config: unknown key steps (did you mean 'run.steps'?)"),
        (["cluster.object_store_mb=1"], "config: cluster.object_store_mb = 1: Ray takes no less than 75"),
        (["env.params.mosst=5"], "config: env.params.mosst is unknown (did you mean 'most'?)"),
        (["env.params.most=2"], "config: env.params.most = 2: must be at least 5"),
        (["queue.url=http://here:1"], "config: queue.url = 'http://here:1': must start with redis://"),
        (["learner.row_tokens=100"], "config: learner.row_tokens = 100: must hold a whole row"),
        (["harness.max_context=1024", "learner.row_tokens=1024"],
         "config: harness.max_context = 1024: the model has 512 positions"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(recipe: Path, overrides: list[str], expected: str) -> None:
    outcome = train(recipe, *overrides)
    assert outcome.line().startswith(f"springtide: {expected}")
    assert not (recipe.parent / "runs").exists(), "a run folder was made for nothing"


def test_an_unknown_key_of_the_file_is_named(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("groups_per_step", "group_per_steps"))
    line = train(recipe).line()
    assert line == "springtide: config: unknown key run.group_per_steps (did you mean 'groups_per_step'?)"


def test_a_recipe_that_is_no_toml(recipe: Path) -> None:
    recipe.write_text("[run\nsteps = 3\n")
    assert f"config: {recipe} is not valid TOML: " in train(recipe).line()


def test_a_recipe_that_does_not_exist(folder: Path) -> None:
    line = train(folder / "nothing.toml").line()
    assert line == f"springtide: config: cannot read recipe {folder}/nothing.toml: No such file or directory"


def test_train_without_a_recipe(folder: Path) -> None:
    line = Outcome(["train"], folder).line()
    assert line == "springtide: config: train needs a recipe (or --resume RUN)"


def test_a_run_root_that_cannot_be_written(recipe: Path) -> None:
    line = train(recipe, "run.root=/proc/runs").line()
    assert line.startswith("springtide: config: cannot make the run folder /proc/runs/")


# -- model and tokenizer ----------------------------------------------------------------------------


def test_a_tokenizer_bigger_than_the_model(recipe: Path, model: Path, folder: Path) -> None:
    shutil.copytree(model, folder / "small")
    facts: dict[str, Any] = json.loads((folder / "small/config.json").read_text())
    size = facts["vocab_size"]
    (folder / "small/config.json").write_text(json.dumps(facts | {"vocab_size": size - 3}))
    line = train(recipe, f"model.path={folder}/small").line()
    assert f"the tokenizer has ids up to {size - 1}, the model's vocabulary ends at {size - 4}" in line


def test_a_model_folder_without_a_chat_template(recipe: Path, model: Path, folder: Path) -> None:
    shutil.copytree(model, folder / "plain")
    (folder / "plain/chat_template.jinja").unlink()
    assert "has no chat template" in train(recipe, f"model.path={folder}/plain").line()


# -- the environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NoMap", "cannot make bad_environments:NoMap: KeyError: 'no such map'"),
        ("NoStart", "the first 3 tasks did not start; the last said: RuntimeError: the level file is"),
    ],
)
def test_an_environment_that_cannot_run(recipe: Path, name: str, expected: str) -> None:
    line = train(recipe, f"env.name=bad_environments:{name}", "env.params={}", "env.sandbox=process").line()
    assert line.startswith("springtide: env: ")
    assert expected in line


def test_a_prompt_longer_than_the_context(recipe: Path) -> None:
    line = train(recipe, "harness.max_context=12", "harness.max_new_tokens=4").line()
    assert "config: harness.max_context = 12 is too small: the first prompt has " in line


# -- queue, cluster, ports --------------------------------------------------------------------------


def test_a_queue_that_does_not_answer(recipe: Path, free_port: int) -> None:
    line = train(recipe, f"queue.url=redis://:secret@127.0.0.1:{free_port}/0").line()
    assert line.startswith(f"springtide: queue: queue server redis://127.0.0.1:{free_port}/0 gave no answer")
    assert "secret" not in line


def test_a_queue_that_refuses_the_password(recipe: Path, folder: Path) -> None:
    server = ValkeyServer(folder / "queue", fsync="no")
    server.start()
    try:
        line = train(recipe, f"queue.url=redis://:wrong@127.0.0.1:{server.port}/0").line()
    finally:
        server.stop()
    assert f"queue: queue server redis://127.0.0.1:{server.port}/0 refused the login" in line


def test_a_cluster_that_does_not_answer(recipe: Path, free_port: int) -> None:
    line = Outcome(["train", str(recipe), "--address", f"127.0.0.1:{free_port}"], recipe.parent).line()
    assert f"config: cluster.address = '127.0.0.1:{free_port}': nobody answers there" in line


def test_overrides_behind_an_option_as_the_readme_writes_them(recipe: Path, free_port: int) -> None:
    """What is said is about the address: the words behind it were understood."""
    words = ["--address", f"127.0.0.1:{free_port}", "queue.url=redis://:PASSWORD@HOST:6380/0", "run.steps=50"]
    line = Outcome(["train", str(recipe), *words], recipe.parent).line()
    assert f"config: cluster.address = '127.0.0.1:{free_port}': nobody answers there" in line


def test_an_address_that_is_none(recipe: Path) -> None:
    line = Outcome(["train", str(recipe), "--address", "ray://somewhere"], recipe.parent).line()
    assert line.startswith("springtide: config: cluster.address = 'ray://somewhere': give HOST:PORT of the")


def test_a_dashboard_port_in_use(recipe: Path, taken_port: int) -> None:
    line = train(recipe, "cluster.dashboard=true", f"cluster.dashboard_port={taken_port}").line()
    assert f"config: cluster.dashboard_port = {taken_port} cannot be used" in line


# -- resume, eval, replay ---------------------------------------------------------------------------


def test_resume_of_something_that_is_no_run(folder: Path) -> None:
    line = Outcome(["train", "--resume", str(folder)], folder).line()
    assert line == f"springtide: config: --resume {folder}: no config.json there; give a run folder"


def test_resume_with_a_damaged_configuration(folder: Path) -> None:
    (folder / "config.json").write_text('{"run": ')
    assert "config.json is damaged" in Outcome(["train", "--resume", str(folder)], folder).line()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.params.hidden=128", f"model.params.hidden = 128 (was not set): {CANNOT}"),
        ("env.params.most=25", f"env.params.most = 25 (was 20): {CANNOT}"),
        ("run.seed=7", f"run.seed = 7 (was 0): {CANNOT}"),
        ("learner.lr=1e-5", "the run has made all its 1 steps; raise run.steps"),
    ],
)
def test_a_resume_that_cannot_be_changes_nothing(recipe: Path, override: str, expected: str) -> None:
    run = recipe.parent / "runs" / "job-1"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(dump(load(recipe))))
    (run / "summary.json").write_text(json.dumps({"steps": 1}))
    before = {path: path.read_bytes() for path in run.rglob("*")}
    line = Outcome(["train", "--resume", str(run), override], recipe.parent).line()
    assert line == f"springtide: config: --resume {run}: {expected}"
    assert {path: path.read_bytes() for path in run.rglob("*")} == before


def test_an_environment_beside_its_recipe_is_found_by_driver_and_sandbox(recipe: Path, folder: Path) -> None:
    """Outside of the clone and of PYTHONPATH; the rehearsal has played it when the prompt is measured."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "mine.py").write_text(BAD_ENVIRONMENTS)
    shutil.copy(recipe, outside / "recipe.toml")
    words = ["env.name=mine:Play", "env.params={}", "harness.max_context=12", "harness.max_new_tokens=9"]
    line = train(outside / "recipe.toml", *words).line()
    assert "config: harness.max_context = 12 is too small: the first prompt has " in line


@pytest.mark.parametrize(
    ("target", "why"), [("{}", "it is a folder"), ("/nowhere/x.json", "no folder /nowhere")]
)
def test_eval_looks_at_its_target_before_the_work(recipe: Path, folder: Path, target: str, why: str) -> None:
    file = target.format(folder)
    line = Outcome(["eval", str(recipe), "--checkpoint", "base", "--json", file], folder).line()
    assert line == f"springtide: config: cannot write {file}: {why}"


def test_eval_of_a_damaged_checkpoint(recipe: Path, model: Path, folder: Path) -> None:
    """A checkpoint whose manifest is right, but for one flipped bit in the weights."""
    checkpoint = folder / "step-000001"
    shutil.copytree(model, checkpoint / "hf")
    write_manifest(checkpoint)
    file = checkpoint / "hf/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    line = Outcome(["eval", str(recipe), "--checkpoint", str(checkpoint)], folder).line()
    assert line.startswith("springtide: checkpoint: ")
    assert "hf/model.safetensors" in line


def test_eval_of_a_checkpoint_that_does_not_exist(recipe: Path, folder: Path) -> None:
    line = Outcome(["eval", str(recipe), "--checkpoint", f"{folder}/nothing"], folder).line()
    assert line == f"springtide: config: --checkpoint = '{folder}/nothing': no such folder"


def test_replay_of_something_that_is_no_run(folder: Path) -> None:
    assert "is no run folder" in Outcome(["replay", str(folder)], folder).line()
    (folder / "config.json").write_text("{}")
    assert "holds no record: train with run.record=true" in Outcome(["replay", str(folder)], folder).line()


REPLAY = '''
import atexit, os, sys, types
from cluster.errors import LearnerLost
from deploy.cli import main

def replay(folder):
    sys.stdout.write("step 1\\n")
    if END == "lost":
        raise LearnerLost("a rank is gone")
    if END == "interrupted":
        raise KeyboardInterrupt
    return int(END)

sys.modules["deploy.replay"] = types.SimpleNamespace(replay=replay)
atexit.register(os.abort)  # as torch's threads may when Python has been torn down
sys.exit(main())
'''


@pytest.mark.parametrize(("end", "code"), [("0", 0), ("1", 1), ("lost", 2), ("interrupted", 130)])
def test_replay_keeps_its_exit_code_whatever_torch_does_at_the_end(folder: Path, end: str, code: int) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "record").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", f"END = {end!r}\n{REPLAY}", "replay", str(folder)],
        cwd=REPO, capture_output=True, text=True, timeout=FAST_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "step 1\n"), done.stderr
    said = {"lost": "a rank is gone", "interrupted": "interrupted"}.get(end, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == bool(said)


def test_report_of_something_that_is_no_run(folder: Path) -> None:
    line = Outcome(["report", str(folder)], folder).line()
    assert line == f"springtide: config: no report of {folder}: it has no metrics.jsonl; give a run folder"
    line = Outcome(["report", f"{folder}/nope"], folder).line()
    assert line == f"springtide: config: no report of {folder}/nope: no such folder; give a run folder"


# -- what is right ----------------------------------------------------------------------------------


def test_dry_run_prints_the_effective_configuration(recipe: Path) -> None:
    outcome = Outcome(["train", str(recipe), "run.steps=7", "--dry-run"], recipe.parent)
    assert (outcome.code, outcome.stderr) == (0, "")
    tree = json.loads(outcome.stdout)
    assert tree["run"]["steps"] == 7
    assert tree["objective"]["clip_high"] == 0.28, "defaults are shown too"


def test_help_loads_nothing_heavy() -> None:
    """Counted by modules, since seconds depend on the machine."""
    code = (
        "import sys, contextlib, io\n"
        "from deploy.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'redis', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=FAST_S, check=True
    )
    assert done.stdout.strip() == "[]"


# -- with Ray ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_an_environment_that_stops_starting_ends_the_job(recipe: Path) -> None:
    """Group after group fails: the job must not go on for ever."""
    name = "env.name=bad_environments:LateStart"
    words = ["train", str(recipe), name, "env.params={}", "env.sandbox=process", "run.max_failed_groups=4"]
    line = Outcome(words, recipe.parent, limit_s=480.0).line()
    assert line.startswith("springtide: run: worker-0: TooManyFailures: 4 groups in a row failed")
    assert "RuntimeError: the licence server is gone" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('generator.backend="nccl"', 'generator.backend = "nccl": both ends exist'),
        ('cluster.weights_folder="/nowhere"', "cluster.weights_folder = '/nowhere': no such folder"),
    ],
)
def test_a_way_of_weights_that_cannot_work(recipe: Path, override: str, message: str) -> None:
    assert message in train(recipe, override).line()
