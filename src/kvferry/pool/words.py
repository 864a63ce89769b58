"""The words that outcomes and reasons are told in, everywhere the same."""

__all__ = [
    "EVICTED",
    "EXPIRED",
    "FULL",
    "HIT",
    "NEVER_SAVED",
    "OVERSIZE",
    "PENDING",
    "PRESENT",
    "REMOVED",
    "RESERVED",
    "SAVED",
    "SIZE_MISMATCH",
]

# of a key that was to be saved
RESERVED = "reserved"  # there is a place for it
SAVED = "saved"
PRESENT = "present"  # it was there already: as good as saved
FULL = "full"
OVERSIZE = "oversize"  # larger than all of the capacity, or of the quota

# of a key that was to be loaded
HIT = "hit"
NEVER_SAVED = "never_saved"  # or so long ago that nobody remembers
EVICTED = "evicted"
EXPIRED = "expired"  # its ttl has passed; of a save: its reservation ended before the commit
REMOVED = "removed"

# of either
PENDING = "pending"  # somebody is saving it
SIZE_MISMATCH = "size_mismatch"  # it is there with another size
