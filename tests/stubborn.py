"""A task that outlives its cancellations."""

import asyncio
import contextlib


async def stay(leave: asyncio.Event) -> None:
    """Ends when ``leave`` says so, and at nothing else."""
    while not leave.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await leave.wait()
