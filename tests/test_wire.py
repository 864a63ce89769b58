"""docs/wire.md is enough to write a peer: this one is written from that page alone, and knows nothing of kvferry's code.

It links with a secret, pulls blocks, and pushes a block that the node then asks it for.
"""

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

import kvferry

SECRET = b"long and random, the page says"
HELLO, CHALLENGE, AUTH, WELCOME, REFUSED, LANE = 1, 2, 3, 4, 5, 6
RESOLVE, GEOMETRY, PULL, PIECE, ENDED, PUSH = 32, 33, 34, 35, 36, 37
CALL, ANSWER, TELL = 42, 43, 44
HEADER = struct.Struct("<IHHQQ")
SOCKET_ONLY = 4
OK = struct.pack("<HBBH", 0, 1, 1, 0)
NO_SPANS = bytes(5)
NO_SUMS = bytes(4)  # in an ENDED


class Connection:
    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=5)

    def send(self, kind: int, body: bytes, operation: int = 0, offset: int = 0) -> None:
        self._socket.sendall(HEADER.pack(len(body), kind, 0, operation, offset) + body)

    def receive(self, kind: int, operation: int = 0) -> bytes:
        length, received, _, number, offset = HEADER.unpack(self._exactly(HEADER.size))
        body = self._exactly(length)
        assert (received, number, offset) == (kind, operation, 0), body
        return body

    def receive_request(self, kind: int) -> tuple[int, bytes]:
        length, received, _, number, _ = HEADER.unpack(self._exactly(HEADER.size))
        assert received == kind
        return number, self._exactly(length)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the node closed the connection"
            data += more
        return data


def text(data: bytes) -> bytes:
    return struct.pack("<H", len(data)) + data


def runs(*pairs: tuple[int, int]) -> bytes:
    return struct.pack("<I", len(pairs)) + b"".join(struct.pack("<II", *pair) for pair in pairs)


def by_name(name: bytes) -> bytes:
    return struct.pack("<BQQ", 1, 0, 0) + text(name) + struct.pack("<I", 0)


def link(address: str, secret: bytes, program: bytes = b"") -> tuple[Connection, bytes]:
    """The control connection and the link's token. Another host's boot id is said, so there is no local step."""
    control = Connection(address)
    hello = b"KVFERRY1" + struct.pack("<HQ", 3, 5) + os.urandom(16) + bytes(16) + os.urandom(32) + b"\1" + text(program)
    control.send(HELLO, hello)
    challenge = control.receive(CHALLENGE)
    unproved, proof = challenge[:-32], challenge[-32:]

    def proof_of(role: bytes) -> bytes:
        return hmac.new(secret, text(role) + hello + unproved, hashlib.sha256).digest()

    if secret == SECRET:
        assert proof == proof_of(b"kvferry listener")
    control.send(AUTH, proof_of(b"kvferry dialler") + b"\0")
    return control, control.receive(WELCOME)


@pytest.fixture
def node() -> Iterator[kvferry.Node]:
    with kvferry.Node(listen="127.0.0.1:0", secret=SECRET) as node:
        node.register("kv", np.arange(80, dtype=np.uint8).reshape(8, 10))
        yield node


def test_a_peer_written_from_the_page_pulls_and_pushes(node: kvferry.Node) -> None:
    control, token = link(node.address, SECRET)
    mine, theirs = Connection(node.address), Connection(node.address)
    mine.send(LANE, token + b"\0\0")
    theirs.send(LANE, token + b"\1\1")

    mine.send(RESOLVE, by_name(b"kv") + b"\0", operation=9)
    geometry = mine.receive(GEOMETRY, operation=9)
    epoch, key_row, file_backed, is_window, units, guards = struct.unpack_from("<QqBBII", geometry)
    assert (epoch > 0, key_row, file_backed, is_window, units, guards) == (True, -1, 0, 0, 0, 1)
    described = geometry[struct.calcsize("<QqBBII") + 12 :]
    assert described[:22] == struct.pack("<Q", 1) + text(b"kv") + b"\1" + text(b"host") + b"\x0a\0\0"
    assert len(described) == 19 + 3 * 8 + 4 + 20

    select = struct.pack("<IIBQqQQ", 0, 1, 1, 10, 0, 0, 0) + runs((1, 2)) + NO_SPANS
    mine.send(PULL, struct.pack("<II", 1000, 0) + by_name(b"kv") + select, operation=10)
    assert mine.receive(PIECE, operation=10) == bytes(range(10, 30))
    assert mine.receive(ENDED, operation=10)[2:] == b"\0\1" + text(b"") + struct.pack("<QB", 20, 4) + NO_SUMS

    everything = struct.pack("<Iq", 0, -1)
    source = struct.pack("<Q", 1) + text(b"far") + b"\1" + text(b"host") + struct.pack("<QQQI", 10, 10, 4, 1)
    source += struct.pack("<QIQ", 4096, 0, 0)
    moves = (
        b"\2"
        + everything * 2
        + struct.pack("<qIqI", 0, 0, -1, 6)
        + runs((3, 1))
        + runs((6, 1))
        + bytes(4)
        + bytes(4)
        + bytes(8)
    )
    guard = struct.pack("<IIQ", 1, 17, 21)
    mine.send(
        PUSH, struct.pack("<IB", 1000, SOCKET_ONLY) + by_name(b"kv") + b"\0" + guard + source + moves, operation=11
    )
    number, asked = theirs.receive_request(PULL)
    assert asked[4:] == guard + struct.pack("<BQQ", 0, 1, 0) + text(b"") + bytes(4) + (
        struct.pack("<IIBQqQQ", 0, 1, 0, 10, 0, 0, 0) + runs((3, 1)) + NO_SPANS
    )
    theirs.send(PIECE, b"ten bytes!", operation=number)
    theirs.send(ENDED, OK + struct.pack("<QB", 10, 4) + NO_SUMS, operation=number)
    assert mine.receive(ENDED, operation=11)[-13:] == struct.pack("<QB", 10, 4) + NO_SUMS
    assert node.caches[0].numpy(0)[6].tobytes() == b"ten bytes!"
    for connection in (mine, theirs, control):
        connection.close()


def test_a_peer_written_from_the_page_moves_spans(node: kvferry.Node) -> None:
    control, token = link(node.address, SECRET)
    mine, theirs = Connection(node.address), Connection(node.address)
    mine.send(LANE, token + b"\0\0")
    theirs.send(LANE, token + b"\1\1")

    select = struct.pack("<IIBQqQQ", 0, 1, 0, 0, 0, 0, 0) + runs() + struct.pack("<BIQQQQ", 1, 2, 77, 3, 5, 2)
    mine.send(PULL, struct.pack("<II", 1000, 0) + by_name(b"kv") + select, operation=10)
    assert mine.receive(PIECE, operation=10) == bytes([77, 78, 79, 5, 6])
    mine.receive(ENDED, operation=10)

    memory = (
        struct.pack("<Q", 0) + text(b"") + b"\3" + text(b"host") + struct.pack("<QQQI", 1, 1, 2**63 - 1, 1) + bytes(20)
    )
    moves = b"\4" + struct.pack("<Iq", 0, -1) * 2 + struct.pack("<qIqI", 0, 0, -1, 0) + runs() + runs()
    moves += struct.pack("<I6Q", 2, 1 << 46, 78, 2, 4096, 33, 3) + bytes(4)
    values = struct.pack("<I2QI2Q", 2, 2, 3, 2, 8, 9)  # of which the sender of a stream takes the checksums itself
    guard = struct.pack("<IIQ", 1, 17, 21)
    mine.send(
        PUSH,
        struct.pack("<IB", 1000, SOCKET_ONLY) + by_name(b"kv") + b"\0" + guard + memory + moves + values,
        operation=11,
    )
    number, asked = theirs.receive_request(PULL)
    assert asked[4:] == guard + struct.pack("<BQQ", 7, 11, 0) + text(b"") + bytes(4) + bytes(
        struct.calcsize("<IIBQqQQ") + 4 + 5
    )
    theirs.send(PIECE, b"five!", operation=number)
    theirs.send(ENDED, OK + struct.pack("<QB", 5, 4) + NO_SUMS, operation=number)
    assert mine.receive(ENDED, operation=11)[-13:] == struct.pack("<QB", 5, 4) + NO_SUMS
    kv = node.caches[0].numpy(0).reshape(-1)
    assert kv[78:].tobytes() == b"fi" and kv[32:37].tobytes() == b"\x20ve!\x24"
    for connection in (mine, theirs, control):
        connection.close()


def test_a_peer_written_from_the_page_calls(node: kvferry.Node) -> None:
    control, token = link(node.address, SECRET)
    lane = Connection(node.address)
    lane.send(LANE, token + b"\0\3")
    lane.send(CALL, b"anybody?", operation=7, offset=1000)
    assert lane.receive(ENDED, operation=7)[:4] == struct.pack("<HBB", 14, 0, 1)
    node.serve_calls()
    lane.send(TELL, b"by the way", operation=8)
    lane.send(CALL, b"what is it?", operation=9, offset=60_000)
    told, asked = node.next_call(5000), node.next_call(5000)
    assert isinstance(told, kvferry.Call) and isinstance(asked, kvferry.Call)
    assert (told.payload, told.one_way, asked.payload, asked.one_way) == (b"by the way", True, b"what is it?", False)
    assert 50_000 < asked.left_ms <= 60_000 and not asked.same_host
    assert asked.answer(b"this")
    assert lane.receive(ANSWER, operation=9) == b"this"
    lane.close()
    control.close()


def test_text_that_is_none_stands_for_itself(node: kvferry.Node) -> None:
    control, _ = link(node.address, SECRET, b"\xff\xfeprogram")
    (back,) = node.links
    assert back.peer_program == "\ufffd\ufffdprogram"
    assert back.statistics().peer == back.peer
    control.close()


def test_another_secret_is_refused(node: kvferry.Node) -> None:
    with pytest.raises(AssertionError, match="the secrets of the two nodes differ"):
        link(node.address, b"another one")
