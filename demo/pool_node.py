"""A pool node of the demo's own: a process behind a socket in a folder of its own. Both are gone when the demo has ended.

It is what ``kvferry pool serve`` starts. Not the node of your own that ``Pool.connect()`` finds, whose blocks are yours and
which would outlive the demo. Needs no kvferry in this process.
"""

import select
import subprocess
import sys
import tempfile

from demo.channel import ANSWERS_WITHIN_S, ENDS_WITHIN_S, WorkerFailedError

STARTS_WITHIN_S = 30.0


class PoolNode:
    """Running as soon as there is one, until ``close`` or the end of its ``with``."""

    def __init__(self, memory_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-demo-")
        self.address = f"unix:{self._folder.name}/pool.sock"
        self._serve = ["pool", "serve", "--listen", self.address, "--memory", str(memory_bytes)]
        self.command = " ".join(["kvferry", *self._serve])
        self.start()

    def start(self) -> None:
        """Again after it was killed, at the same address."""
        self._process = subprocess.Popen(
            # Idle for so long, it belongs to a demo that was killed.
            [sys.executable, "-m", "kvferry.cli", *self._serve, "--idle-s", str(ANSWERS_WITHIN_S)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the demo alone, which then ends it
        )
        try:
            self._wait_until_it_listens()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """As a crash would end it."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the process, by force where it does not end when asked, and removes its folder."""
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> "PoolNode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_it_listens(self) -> None:
        """Its first line says that it does; one that fails ends without any."""
        stdout = self._process.stdout
        if not select.select([stdout], [], [], STARTS_WITHIN_S)[0] or not stdout.readline():
            raise WorkerFailedError("The pool node did not start (its last words are above).")
