"""Threads for what runs beside its caller, and how its end is waited for: with a limit, by polling, or by await."""

import queue
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from kvferry.errors import Busy, DeadlineExceeded
from kvferry.options import checked_timeout
from kvferry.threads import start_thread

__all__ = ["Future", "Workers"]

T = TypeVar("T")


class Future(Generic[T]):
    """What an asynchronous call will have come to. Waiting again gives the same; any thread or loop may wait.

    After it has ended, nothing is read from or written to the caller's buffers on its behalf.
    """

    __slots__ = ("_callbacks", "_ended", "_error", "_give_up", "_lock", "_result")

    def __init__(self, give_up: Callable[[], None] = lambda: None) -> None:
        """``give_up`` has what is under way touch nothing more, and returns when that is so."""
        self._give_up = give_up
        self._lock = threading.RLock()
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        return self._ended

    def wait(self, timeout_ms: int | None = None) -> T:
        """What it came to; waits for ``timeout_ms`` at most, or until it ends.

        :raises DeadlineExceeded: the wait is over and the call goes on. :raises InvalidArgument: memory that was named
            turned out not to be there.
        """
        limit = -1 if timeout_ms is None else checked_timeout(timeout_ms) / 1000
        if not self._ended:
            # Each wait has a lock of its own. That of a threading.Event is everybody's, and stays held for good where a signal
            # handler raises amid a wait.
            end = threading.Lock()
            end.acquire()
            self._when_ended(end.release)
            if not end.acquire(True, limit) and self._forget(end.release):
                raise DeadlineExceeded("the call has not ended yet; it goes on, and may be waited for again")
        return self._value()

    def cancel(self) -> None:
        """From when this returns on nothing is read from or written to the caller's buffers on its behalf. It ends soon after,
        with ``timeout`` for what had not moved. An ``await`` that is cancelled does the same."""
        if not self.done():
            self._give_up()

    def __await__(self) -> "Generator[Any, None, T]":
        import asyncio

        if not self.done():
            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def wake() -> None:
                if not ended.done():
                    ended.set_result(None)

            def tell() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:  # the loop is closed: nobody waits in it
                    return

            self._when_ended(tell)
            try:
                yield from ended.__await__()
            except BaseException:
                self.cancel()
                raise
        return self._value()

    def run(self, work: Callable[[], T]) -> None:
        """Ends with what ``work`` returns or raises; for whoever carries it out."""
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - it is the waiting thread's
            self._error = error
        with self._lock:
            self._ended = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _when_ended(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def _forget(self, callback: Callable[[], None]) -> bool:
        """False: it has ended meanwhile."""
        with self._lock:
            if not self._ended:
                self._callbacks.remove(callback)
            return not self._ended

    def __repr__(self) -> str:
        return f"<Future: {'ended' if self.done() else 'under way'}>"


def _started(work: Callable[[], None], name: str) -> bool:
    try:
        start_thread(name, work)
    except Busy:
        return False
    return True


class _Job:
    """``taken``: somebody carries it out, or its time was over before anybody could."""

    __slots__ = ("future", "late", "taken", "work")

    def __init__(self, future: Future[Any], work: Callable[[], Any], late: Callable[[], Any]) -> None:
        self.future, self.work, self.late, self.taken = future, work, late, False


class Workers:
    """Up to ``most`` daemon threads, made when there is work and none is idle, and one that looks at the clock while work
    waits for a thread."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting: list[tuple[float, int, _Job]] = []  # by the end of their time
        self._serial = 0
        self._watched = False
        self._threads = 0
        self._idle = 0
        self._closed = self._within = False

    def submit(
        self,
        work: Callable[[], T],
        until: float,
        late: Callable[[], T],
        give_up: Callable[[], None] = lambda: None,
    ) -> "Future[T]":
        """Has ``work`` run on one of the threads, or ``late`` if none is free for it before ``until`` (monotonic clock), or
        they are closed; on the calling thread, before this returns, if no thread can be had. ``give_up``: as for the
        future."""
        future: Future[T] = Future(give_up)
        job = _Job(future, work, late)
        here = work
        with self._lock:
            if not self._within:  # else this is a signal handler, on a thread that is just submitting
                self._within = True
                try:
                    if self._closed:
                        here = late
                    elif self._served(job, until):
                        self._queue.put(job)
                        return future
                finally:
                    self._within = False
        future.run(here)
        return future

    def _served(self, job: _Job, until: float) -> bool:
        """Some thread will take it, now or later."""
        if self._idle > 0:
            self._idle -= 1
            return True
        if self._threads < self._most:
            self._threads += 1
            wanted, started = [True], False
            try:
                started = _started(partial(self._serve, wanted), self._name)
            finally:
                if not started:  # a thread that there may be when a signal handler has raised ends at once
                    wanted.clear()
                    self._threads -= 1
            if started:
                return True
        if self._threads:
            self._watch_for(job, until)
        return self._threads > 0

    def close(self) -> None:
        """What was submitted is still carried out; the threads end after it."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _serve(self, wanted: list[bool]) -> None:
        with self._lock:
            if not wanted:
                return
        while (job := self._queue.get()) is not None:
            if self._take(job):
                job.future.run(job.work)
            del job
            with self._lock:
                if self._queue.empty():
                    self._idle += 1

    def _take(self, job: _Job) -> bool:
        with self._lock:
            if job.taken:
                return False
            job.taken = True
            if self._waiting:
                self._changed.notify()
            return True

    def _watch_for(self, job: _Job, until: float) -> None:
        self._serial += 1
        heappush(self._waiting, (until, self._serial, job))
        if self._watched:
            self._changed.notify()
        else:
            self._watched = _started(self._watch, f"{self._name}-clock")

    def _watch(self) -> None:
        while True:
            with self._lock:
                while self._waiting and self._waiting[0][2].taken:
                    heappop(self._waiting)
                if not self._waiting:
                    self._watched = False
                    return
                until, _, job = self._waiting[0]
                left = until - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                job.taken = True
            job.future.run(job.late)
            del job
