"""What can go wrong, named by what the caller can do about it.

Every error of kvferry is a :class:`KvferryError`. It says which peer, cache and operation it is about and, for transfers,
what is known about the bytes. This module knows nothing of the core: the core is handed ``BY_KIND`` once, at import, and
makes the exceptions itself, without running any Python.
"""

from typing import ClassVar

__all__ = [
    "AddressInUse",
    "AlreadyExists",
    "AlreadyLinked",
    "Busy",
    "CacheNotFound",
    "Cancelled",
    "DeadlineExceeded",
    "InternalError",
    "InvalidArgument",
    "KvferryError",
    "LinkFailed",
    "NodeClosed",
    "NotLinked",
    "OutOfMemory",
    "PeerLost",
    "Refused",
    "Unsupported",
]


def _short(word: str) -> str:
    line = " ".join(word.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


class KvferryError(Exception):
    """The root of all errors raised by kvferry; ``str()`` of it is one sentence, and behind it, in brackets, the cache and
    the peer that it is about, where the sentence does not name them.

    ========================  =====================================================================================
    ``kind``                  the kind in one word, the same as the class
    ``peer``                  the peer it is about, such as ``node 7 at 127.0.0.1:7000``; ``""`` if none
    ``cache``                 the cache it is about, such as ``cache 3 'kv'``; ``""`` if none
    ``operation``             the call that failed, such as ``pull``; ``""`` if none
    ``bytes_touched``         False: nothing has changed anywhere. True: the bytes inside the destination spans of this
                              one operation are unspecified until they are written again; nothing else has changed
    ``destination_settled``   True: nobody writes to the destination any more, it may be freed or reused at once. False:
                              a receiver could not be heard any more, or the kernel itself still holds a copy
    ========================  =====================================================================================
    """

    kind: ClassVar[str] = "internal"

    def __init__(
        self,
        sentence: str,
        *,
        peer: str = "",
        cache: str = "",
        operation: str = "",
        bytes_touched: bool = False,
        destination_settled: bool = True,
    ) -> None:
        super().__init__(sentence)
        self.peer = peer
        self.cache = cache
        self.operation = operation
        self.bytes_touched = bytes_touched
        self.destination_settled = destination_settled

    def __str__(self) -> str:
        sentence = super().__str__()
        beside = [_short(word) for word in (self.cache, self.peer) if word and _short(word) not in sentence]
        return f"{sentence} ({'; '.join(beside)})" if beside else sentence


class InvalidArgument(KvferryError, ValueError):
    """The call can never work as it stands; nothing has moved. Fix the call."""

    kind = "invalid_argument"


class CacheNotFound(KvferryError):
    """The cache, key, window or row does not exist, or not any more. Repeating is safe once it is registered."""

    kind = "not_found"


class NotLinked(KvferryError):
    """There is no such link (any more); nothing has moved. Link first, then repeat."""

    kind = "not_linked"


class AlreadyLinked(KvferryError):
    """Another live node that has this one's ``node_id`` is linked to that peer: give each an id of its own. Or this node has
    a link there that it did not want replaced."""

    kind = "already_linked"


class LinkFailed(KvferryError):
    """Nobody answered at that address, or somebody who does not speak this protocol. Repeating is safe."""

    kind = "link_failed"


class Refused(KvferryError):
    """The peer answered and said no: another secret, another protocol version, another user."""

    kind = "refused"


class PeerLost(KvferryError):
    """The other process, or the way to it, was lost during the operation. Link anew, then repeat."""

    kind = "peer_lost"


class DeadlineExceeded(KvferryError):
    """Time was up. The link still works, and repeating is safe; see ``bytes_touched``."""

    kind = "deadline"


class Cancelled(KvferryError):
    """The operation was cancelled by this side. It has stopped: nothing is written any more, by a push if
    ``destination_settled``."""

    kind = "cancelled"


class NodeClosed(KvferryError):
    """The node is closed, or this process is the forked child of the one that made it."""

    kind = "closed"


class Busy(KvferryError):
    """Something else holds what was asked for at this moment, or descriptors, threads or places have run out; repeating later
    is safe."""

    kind = "busy"


class OutOfMemory(KvferryError):
    """The node's pool, or the machine, has not enough memory left; nothing was kept."""

    kind = "out_of_memory"


class AddressInUse(KvferryError):
    """Somebody else listens at that address."""

    kind = "address_in_use"


class Unsupported(KvferryError):
    """This build, kernel or kind of memory cannot do that; the sentence says what can."""

    kind = "unsupported"


class AlreadyExists(KvferryError):
    """The name or key is taken; nothing has changed."""

    kind = "exists"


class InternalError(KvferryError):
    """A defect in kvferry itself: please report the sentence."""

    kind = "internal"


BY_KIND: dict[str, type[KvferryError]] = {error.kind: error for error in KvferryError.__subclasses__()}
