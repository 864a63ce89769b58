"""The harness for tests with real processes.

`Peer` is a child process that does what the test tells it; `PeerRaised`, `PeerDied` and `PeerTimeout` are what its
calls raise. ``child`` is the other end of the pipe, ``watchdog`` ends a test that hangs. Nothing here knows kvferry.
"""

from support.peer import Peer, PeerDied, PeerError, PeerRaised, PeerTimeout, Pending

__all__ = ["Peer", "PeerDied", "PeerError", "PeerRaised", "PeerTimeout", "Pending"]
