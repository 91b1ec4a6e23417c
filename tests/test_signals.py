"""The first signal cancels, later ones change nothing, and what cleans up is never cut short."""

import asyncio
import os
import signal

import pytest

from deploy import signals
from deploy.signals import Stopper, Terminated, cancelled, settled, sigterm_raises
from tests.stubborn import stay


async def test_cleaning_up_outlives_every_cancellation() -> None:
    done = []

    async def clean() -> str:
        for step in range(5):
            await asyncio.sleep(0.02)
            done.append(step)
        return "clean"

    task = asyncio.create_task(settled(clean()))
    for _ in range(3):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [0, 1, 2, 3, 4]
    assert await settled(clean()) == "clean"


async def test_an_error_of_the_work_passes_and_is_kept_behind_a_cancellation() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.02)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await settled(fail())
    task = asyncio.create_task(settled(fail()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_lost_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "AGAIN_S", 0.01)
    losses = [0]

    async def lose(count: int) -> None:
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                losses[0] += 1
                if losses[0] > count:
                    raise

    task, other = asyncio.create_task(lose(3)), asyncio.create_task(asyncio.sleep(30))
    await asyncio.sleep(0)
    assert await cancelled([task, other], 5.0) == set()
    assert task.cancelled() and other.cancelled() and losses == [4]
    assert await cancelled([task], 5.0) == set() and await cancelled([], 5.0) == set()


async def test_a_task_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "AGAIN_S", 0.01)
    leave = asyncio.Event()

    task, other = asyncio.create_task(stay(leave)), asyncio.create_task(asyncio.sleep(30))
    await asyncio.sleep(0)
    assert await cancelled([task, other], 0.1) == {task} and other.cancelled()
    leave.set()
    await task


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_signals_cancel_once(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), number)  # again, during the shutdown
            await asyncio.sleep(0.1)
            cleaned.set()

    stopper = Stopper(lambda: told.append("stopping"))
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(stopper.run(work()), 10)
    finally:
        for n, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            asyncio.get_running_loop().remove_signal_handler(n)
            signal.signal(n, handler)
    assert cleaned.is_set()
    assert told == ["stopping"]
    assert stopper.exit_code == code
    assert capsys.readouterr().err == "springtide: already stopping, a few seconds more\n"


def test_sigterm_outside_an_event_loop_unwinds_the_stack() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) == before
