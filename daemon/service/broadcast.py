"""Live messages to whoever listens on `/v1/stream`. A slow listener loses the oldest and holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

QUEUE_LENGTH = 256
MAX_LISTENERS = 200


Message = tuple[str, Mapping[str, Any]]
Listener = asyncio.Queue[Message | None]


class Broadcast:
    """`send` from any thread; `listen` in an event loop."""

    def __init__(self) -> None:
        self._listeners: dict[Listener, asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        return len(self._listeners) >= MAX_LISTENERS

    def send(self, name: str, content: Mapping[str, Any]) -> None:
        """Tell everyone."""
        self._tell((name, content))

    def close(self) -> None:
        """End all listening, so that the server can end."""
        with self._lock:
            self._closed = True
        self._tell(None)

    def _tell(self, item: Message | None) -> None:
        with self._lock:
            listeners = list(self._listeners.items())
        for queue, loop in listeners:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put, queue, item)

    async def listen(self, idle_s: float) -> AsyncIterator[Message | None]:
        """Messages as they come; None after `idle_s` without one, so that the connection can be kept alive."""
        queue: Listener = asyncio.Queue(QUEUE_LENGTH)
        with self._lock:
            if self._closed:
                return
            self._listeners[queue] = asyncio.get_running_loop()
        try:
            while True:
                try:
                    item = await asyncio.wait_for(queue.get(), idle_s)
                except TimeoutError:
                    yield None
                    continue
                if item is None:
                    return
                yield item
        finally:
            with self._lock:
                self._listeners.pop(queue, None)


def _put(queue: Listener, item: Message | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)
