"""Where sides listen; imports neither door."""

import socket

LOOPBACK = "127.0.0.1"


_kept: list[socket.socket] = []


def free_port() -> int:
    """Kept for whoever listens there before long, with SO_REUSEADDR: the kernel gives it to nobody else meanwhile."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((LOOPBACK, 0))
    _kept.append(kept)
    return int(kept.getsockname()[1])
