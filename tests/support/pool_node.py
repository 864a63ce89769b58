"""A stand-in for the pool node: binds the socket that it is told, and leaves when it is asked to. Run as a script.

    pool_node.py WAY --listen unix:PATH --memory BYTES --idle-s SECONDS

WAY: plain; slow (listens late); dies (at once, with a word); deaf (never listens); stubborn (does not leave).
"""

import os
import signal
import socket
import sys
import time


def main() -> None:
    way, *words = sys.argv[1:]
    path = words[words.index("--listen") + 1].removeprefix("unix:")
    if way == "dies":
        sys.exit("no wish to live")
    if way == "slow":
        time.sleep(1.0)
    listener = socket.socket(socket.AF_UNIX)
    if way != "deaf":
        listener.bind(path)
        listener.listen(64)
    leaving = (
        signal.SIG_IGN if way == "stubborn" else lambda *_: (os.path.exists(path) and os.unlink(path), os._exit(0))
    )
    signal.signal(signal.SIGTERM, leaving)
    while True:
        if way == "deaf":
            time.sleep(1.0)
        else:
            listener.accept()[0].close()


if __name__ == "__main__":
    main()
