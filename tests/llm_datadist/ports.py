"""Where sides listen; imports neither door."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        return int(taken.getsockname()[1])
