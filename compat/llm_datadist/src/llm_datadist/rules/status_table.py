"""Which status a vendor's caller sees for each kind of kvferry error.

The numbers are the contract's; the table is total: a kind nobody thought of is ``FAILED``.
"""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0x0
FAILED: Final = 0xFFFFFFFF
KV_CACHE_NOT_EXIST: Final = 0x5010B002
PARAM_INVALID: Final = 0x5010B005
NOT_YET_LINK: Final = 0x5010B007
ALREADY_LINK: Final = 0x5010B008
LINK_FAILED: Final = 0x5010B009
UNLINK_FAILED: Final = 0x5010B00A
EXIST_LINK: Final = 0x5010B018
FEATURE_NOT_ENABLED: Final = 0x5010B019
TIMEOUT: Final = 0x5010B01A
LINK_BUSY: Final = 0x5010B01B
OUT_OF_MEMORY: Final = 0x5010B01C

_BY_KIND: Final[dict[str, int]] = {
    "invalid_argument": PARAM_INVALID,
    "not_found": KV_CACHE_NOT_EXIST,
    "not_linked": NOT_YET_LINK,
    "already_linked": ALREADY_LINK,
    "link_failed": LINK_FAILED,
    "refused": LINK_FAILED,
    "peer_lost": FAILED,
    "deadline": TIMEOUT,
    "cancelled": FAILED,
    "closed": FAILED,
    "busy": LINK_BUSY,
    "out_of_memory": OUT_OF_MEMORY,
    "address_in_use": FAILED,
    "unsupported": FEATURE_NOT_ENABLED,
    "exists": PARAM_INVALID,
    "internal": FAILED,
}

# The same kind means something else in some calls: (call, kind) -> status. On a finalized engine the vendor answers
# PARAM_INVALID for whatever names a cache and moves its bytes, FAILED for the rest.
_BY_CALL: Final[dict[tuple[str, str], int]] = {
    ("transfer", "closed"): PARAM_INVALID,
    ("link", "peer_lost"): LINK_FAILED,
    ("link", "not_found"): LINK_FAILED,
    ("link", "invalid_argument"): PARAM_INVALID,
    ("unlink", "peer_lost"): UNLINK_FAILED,
    ("unlink", "link_failed"): UNLINK_FAILED,
    ("unlink", "not_linked"): SUCCESS,
    ("unlink", "busy"): UNLINK_FAILED,
}


def status_of(kind: str, call: str = "") -> int:
    """The status for a kvferry error ``kind`` in a ``call`` of "transfer", "link", "unlink" or any other."""
    return _BY_CALL.get((call, kind), _BY_KIND.get(kind, FAILED))
