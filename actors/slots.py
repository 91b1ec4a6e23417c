"""Places for trajectories in flight: a semaphore whose size may change while it is in use."""

import asyncio
from collections import deque


class Slots:
    """First come, first served. Shrinking takes effect as places are given back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def resize(self, capacity: int) -> None:
        """Change the size; never takes a place away from its holder."""
        self.capacity = capacity
        self._grant()

    async def acquire(self) -> None:
        """Wait for a place; the caller sets the deadline."""
        if self.used < self.capacity and not self._waiters:
            self.used += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # granted in the same tick: pass it on
                self.release()
            else:
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Give a place back."""
        self.used -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.used < self.capacity:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.used += 1
                waiter.set_result(None)
