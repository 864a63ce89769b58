"""Pickled messages over a socket, each behind its length. Both ends of a peer's pipe use it; it knows no message."""

import pickle
import socket
import struct
from typing import Any

HEADER = struct.Struct("<Q")


def send(pipe: socket.socket, message: Any) -> None:
    """Raises what the socket raises; `TimeoutError` where it has a time-out and the other side does not read."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.sendall(HEADER.pack(len(data)) + data)


def receive(pipe: socket.socket) -> Any:
    """The next message; raises `EOFError` when the other side has gone."""
    (size,) = HEADER.unpack(_exactly(pipe, HEADER.size))
    return pickle.loads(_exactly(pipe, size))


def _exactly(pipe: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = pipe.recv_into(view)
        except ConnectionError:
            count = 0
        if not count:
            raise EOFError("the other side has gone")
        view = view[count:]
    return bytes(data)
