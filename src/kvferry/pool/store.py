"""What a pool node holds: who may save where, what is found where, and who goes when room is needed.

    store = Store(capacity_bytes, segment_bytes=…, policy="s3fifo", add_segment=…, drop_segment=…)
    space = store.space(namespace, fingerprint, quota_bytes=…, apart=…)     # keys are bytes, unique within a space

    saving = store.reserve(space, keys, sizes, parents=CHAIN, ttl_ms=None, owner=…, until=…, now=…)
    saving.places       # where to copy each value; None for those that `saving.outcomes` gives another word for
    store.commit(saving, failed={3: "lost"}, checksums=…, now=…)            # the outcomes; from now on found
    store.abort(saving)                                                     # or never

    lease = store.lookup(space, keys, sizes=…, owner=…, until=…, now=…)
    lease.places, lease.checksums, lease.outcomes                           # None and a reason where nothing is found
    store.release(lease)                                                    # until then nothing of it is overwritten

A reservation or lease is *open*, then perhaps *ended* (its time is up, its owner is gone: `expire` and `end_owner` say
so to the caller, who makes sure that nobody copies there any more), then *closed* by commit, abort or release, which is
when its places can be used again; closing twice is fine. An ended reservation is not committed: EXPIRED. What is removed
while somebody reads it is not found any more, and its place is free after the last release. What is removed while somebody
saves it is not published.

Eviction takes what its policy names, never what is reserved, leased or the parent of a value that is still there. A
namespace with a quota or with segments of its own (`apart`) has a policy of its own; at its quota it evicts its own
values, else the one that holds most gives first. A value for which too much would have to go (GIVES_UP) is FULL.

A *copy* stands for a value that another node owns. It is found as others are, takes room that is free or other copies',
goes before any value does, and makes way for a value of its own key.

Knows no clock, no memory and no threads: ``now`` and ``until`` are seconds on any clock that does not go back, and
places are numbers. Driven by one thread: the pool node's loop, a simulation, or a replay.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from math import inf
from operator import attrgetter
from typing import Final, Literal

import numpy as np

from kvferry.pool.arena import Arena, Slab, Spot, rounded
from kvferry.pool.eviction import POLICIES, Entry, Ghosts, Policy
from kvferry.pool.held import Held, Lease, Namespace, Reservation, Space
from kvferry.pool.records import NamespaceStatistics, StoreStatistics
from kvferry.pool.words import (
    EVICTED,
    EXPIRED,
    FULL,
    HIT,
    NEVER_SAVED,
    OVERSIZE,
    PENDING,
    PRESENT,
    REMOVED,
    RESERVED,
    SAVED,
    SIZE_MISMATCH,
)

__all__ = ["CHAIN", "Lease", "NamespaceStatistics", "Reservation", "Space", "Store", "StoreStatistics"]

CHAIN: Final = "chain"
"""For ``parents``: each key's parent is the key before it."""

_EARLY = "early"  # evicted, out of the policy's small queue

DEFAULT_POLICY = "s3fifo"
"""By replaying a trace of production traffic: docs/pool.md, "Which policy"."""
GIVES_UP = 8
"""A value is FULL when so many times its bytes (and a segment's) went for it, and there is still no place in one piece."""


class Store:
    """See the module. ``add_segment(number, bytes)`` may return False (no memory now: the store evicts instead);
    ``drop_segment(number)`` is called for a segment without a place in use. ``policy`` is a name of POLICIES, or
    makes one."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        segment_bytes: int = 256 << 20,
        policy: str | Callable[[], Policy] = DEFAULT_POLICY,
        add_segment: Callable[[int, int], bool | None],
        drop_segment: Callable[[int], None],
    ) -> None:
        self._arena = Arena(
            capacity_bytes, segment_bytes=segment_bytes, add_segment=add_segment, drop_segment=drop_segment
        )
        self._make_policy = POLICIES[policy] if isinstance(policy, str) else policy
        self._shared = self._make_policy()
        self._policies = [self._shared]
        self._copies: list[Policy] = []
        self._namespaces: dict[str, Namespace] = {}
        self._spaces: dict[int, Space] = {}
        self._last_space = 0
        self._ghosts = Ghosts()
        self._keys = 0  # copies included
        self._copied = 0
        self._serial = 0
        self._owners: dict[Hashable, set[Held]] = {}
        self._deadlines: list[tuple[float, int, Held]] = []
        self._passed = 0  # of them, those that are closed
        self._ttls: list[tuple[float, int, list[Entry]]] = []  # the entries of one commit
        self._ttl_listed = self._ttl_live = 0
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._not_saved: Counter[str] = Counter()

    def __del__(self) -> None:
        # A chain of entries that goes as one would be freed recursively, each by its child, and overflow the C stack.
        for space in self._spaces.values():
            for entry in space.entries.values():
                entry.parent = None

    # --- spaces ---------------------------------------------------------------------------------------------------

    def space(
        self, namespace: str, fingerprint: bytes = b"", *, quota_bytes: int | None = None, apart: bool = False
    ) -> Space:
        """The space for values of this geometry. A quota holds for all of the namespace from now on (a smaller one
        from its next reservation on); None leaves it as it is. ``apart``: in segments of the namespace's own, said
        when it is first named."""
        owner = self._namespaces.get(namespace)
        if owner is None:
            owner = self._namespaces[namespace] = Namespace(namespace, namespace if apart else "", self._shared)
            if apart:
                self._part(owner)
        if quota_bytes is not None:
            owner.quota_bytes = quota_bytes
            if owner.policy is self._shared:
                self._part(owner)
        for space in owner.spaces:
            if space.fingerprint == fingerprint:
                return space
        self._last_space += 1
        space = self._spaces[self._last_space] = Space(self._last_space, owner, fingerprint)
        owner.spaces.append(space)
        return space

    def forget(self, space: Space) -> bool:
        """Forgets a space that nobody will name again, and with the last one of a namespace its quota too; False while
        anything of it is there."""
        namespace = space.namespace
        last = len(namespace.spaces) == 1
        if space.entries or space.pending or (last and namespace.bytes):
            return False
        del self._spaces[space.number]
        namespace.spaces.remove(space)
        if last:
            del self._namespaces[namespace.name]
            if namespace.policy is not self._shared:
                self._policies.remove(namespace.policy)
            if namespace.copies is not None:
                self._copies.remove(namespace.copies)
        return True

    def _part(self, namespace: Namespace) -> None:
        """Gives it a policy of its own, and with it what it holds."""
        values = {entry for space in namespace.spaces for entry in space.entries.values() if not entry.copy}
        namespace.policy = self._shared.part(values) if values else self._make_policy()
        self._policies.append(namespace.policy)

    # --- looking --------------------------------------------------------------------------------------------------

    def exists(self, space: Space, keys: Iterable[bytes], now: float) -> bytes:
        """One byte per key: 1 if a lookup would find it now. Counts as no use."""
        if self._ttls and self._ttls[0][0] <= now:
            self._end_values(now)
        return bytes(map(space.entries.__contains__, keys))

    def prefix(self, space: Space, keys: Sequence[bytes], now: float) -> int:
        """How many keys from the first on there are without a gap."""
        missing = self.exists(space, keys, now).find(0)
        return len(keys) if missing < 0 else missing

    def lookup(
        self,
        space: Space,
        keys: Sequence[bytes],
        *,
        sizes: Sequence[int] | None = None,
        owner: Hashable,
        until: float,
        now: float,
    ) -> Lease:
        """Finds and pins. With ``sizes`` a value of another size is not found. Keys in the order of their chain."""
        if self._ttls and self._ttls[0][0] <= now:
            self._end_values(now)
        lease = Lease(space, keys, owner, until)
        entries: list[Entry | None] = list(map(space.entries.get, keys))
        if None in entries or (sizes is not None and list(map(_SIZE, entries)) != sizes):
            for at, entry in enumerate(entries):
                outcome = HIT
                if entry is None:
                    outcome = self._why_not(space, keys[at])
                elif sizes is not None and entry.size != sizes[at]:
                    outcome, entries[at] = SIZE_MISMATCH, None
                if outcome is not HIT:
                    self._misses[outcome] += 1
                lease.outcomes.append(outcome)
        else:
            lease.outcomes = [HIT] * len(entries)
        lease.entries = entries
        found = [*filter(None, entries)]
        if found:
            for entry in found:
                entry.pins += 1
            _touch(space.namespace, found)
            self._counts["hits"] += len(found)
            self._counts["hit_bytes"] += sum(map(_SIZE, found))
            self._hold(lease)
        else:
            lease.closed = True
        return lease

    def release(self, lease: Lease) -> None:
        """Unpins; to be called when nobody copies from its places any more."""
        if lease.closed:
            return
        self._let_go(lease)
        namespace = lease.space.namespace
        for entry in filter(None, lease.entries):
            entry.pins -= 1
            if not entry.pins:
                if not entry.alive:
                    self._free(namespace, (entry.slab, entry.index))
                elif not entry.children:
                    _policy_of(namespace, entry).unheld(entry)

    # --- saving ---------------------------------------------------------------------------------------------------

    def reserve(
        self,
        space: Space,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        *,
        parents: Sequence[bytes | None] | Literal["chain"] | None = None,
        ttl_ms: float | None = None,
        owner: Hashable,
        until: float,
        now: float,
        copy: bool = False,
    ) -> Reservation:
        """Finds places; evicts for them. ``sizes`` are bytes, at least 1 each. ``parents``: CHAIN, or a key or None per
        key; a parent that is not there when the child is committed is not known. ``ttl_ms`` counts from the commit. A key
        that is there already with the same size is PRESENT, which counts as a use; with another, SIZE_MISMATCH; one that
        is being saved, or comes twice here, PENDING. ``copy``: these are copies."""
        if self._ttls and self._ttls[0][0] <= now:
            self._end_values(now)
        self._arena.ask_again()
        if isinstance(parents, str):
            parents = [None, *keys[:-1]]
        saving = Reservation(space, keys, sizes, owner, until, parents, ttl_ms, copy)
        outcomes = saving.outcomes
        used: list[Entry] = []
        hopeless: float = inf  # for a value of this size nothing was found in this call
        namespace = space.namespace
        self._room_at_once(saving)
        reserved = len(outcomes)
        add_outcome, add_slab, add_index = outcomes.append, saving.slabs.append, saving.indices.append
        find, pending, room = space.entries.get, space.pending, self._room
        for at in range(reserved, len(keys)):
            key, size = keys[at], sizes[at]
            entry = find(key)
            if entry is not None and entry.copy and (not copy or entry.size != size):
                self._drop(entry, EVICTED)
                entry = None
            if entry is not None:
                if entry.size == size:
                    outcome = PRESENT
                    used.append(entry)
                else:
                    outcome = SIZE_MISMATCH
            elif key in pending:
                outcome = PENDING
            elif size >= hopeless:
                outcome = FULL if self._could_hold(namespace, size) else OVERSIZE
            else:
                spot = room(namespace, size, copy)
                if spot is not None:
                    add_outcome(RESERVED)
                    add_slab(spot[0])
                    add_index(spot[1])
                    pending[key] = saving
                    reserved += 1
                    continue
                if self._could_hold(namespace, size):
                    outcome = FULL
                    hopeless = size
                else:
                    outcome = OVERSIZE
            add_outcome(outcome)
            add_slab(None)
            add_index(0)
            self._not_saved[outcome] += 1
        if used:
            # One that was PRESENT may have gone for the room of a later key; it was there when it was asked for.
            _touch(space.namespace, [entry for entry in used if entry.alive])
        if reserved:
            self._hold(saving)
        else:
            saving.closed = True
        return saving

    def commit(
        self,
        saving: Reservation,
        *,
        failed: Mapping[int, str] | None = None,
        checksums: Sequence[object] | None = None,
        now: float,
    ) -> list[str]:
        """Publishes what was RESERVED and closes the reservation: the outcomes, now SAVED, or EXPIRED for all of them, or
        REMOVED, or what ``failed`` says of a key by its number."""
        if self._ttls and self._ttls[0][0] <= now:
            self._end_values(now)
        if saving.closed or saving.ended or saving.until <= now:
            self.abort(saving)
            return saving.outcomes
        self._let_go(saving)
        space, outcomes, copy = saving.space, saving.outcomes, saving.copy
        namespace, entries, pending = space.namespace, space.entries, space.pending
        keys, sizes, above = saving.keys, saving.sizes, saving.parents
        slabs, indices = saving.slabs, saving.indices
        if failed or saving.void:
            slabs = self._kept(saving, failed or {})
        if None not in slabs:
            outcomes[:] = [SAVED] * len(slabs)
        else:
            kept = [at for at, slab in enumerate(slabs) if slab is not None]
            for at in kept:
                outcomes[at] = SAVED
            keys, sizes = [keys[at] for at in kept], [sizes[at] for at in kept]
            slabs, indices = [slabs[at] for at in kept], [indices[at] for at in kept]
            checksums = checksums and [checksums[at] for at in kept]
            above = above and [above[at] for at in kept]
        if not slabs:
            return outcomes
        if len(pending) == len(keys):
            pending.clear()
        else:
            for key in keys:
                del pending[key]
        # Equal sizes are one number: there may be millions of entries.
        one: dict[int, int] = {}
        same = sizes.count(sizes[0]) == len(sizes)
        shared = repeat(sizes[0]) if same else [one.setdefault(size, size) for size in sizes]
        expires = None if saving.ttl_ms is None else now + saving.ttl_ms / 1000
        new = list(
            map(
                Entry,
                keys,
                repeat(space.number),
                slabs,
                indices,
                shared,
                repeat(None) if checksums is None else checksums,
                repeat(expires),
                repeat(copy),
            )
        )
        if above is None:
            entries.update(zip(keys, new, strict=True))
        else:
            for key, entry, before in zip(keys, new, above, strict=True):
                parent = None if before is None else entries.get(before)
                if parent is not None and parent.copy is copy:  # a copy that a value holds would not be the first to go
                    parent.children += 1
                    entry.parent = parent
                entries[key] = entry
        returning = self._ghosts.take_all(np.fromiter(map(hash, keys), np.int64, len(keys)) ^ space.salt, _EARLY)
        if copy:
            self._copies_of(namespace).add(new, returning)
            self._copied += len(new)
        else:
            namespace.policy.add(new, returning)
        self._keys += len(new)
        self._counts["saved"] += len(new)
        self._counts["saved_bytes"] += sum(sizes)
        if expires is not None:
            self._serial += 1
            heappush(self._ttls, (expires, self._serial, new))
            self._ttl_listed += len(new)
            self._ttl_live += len(new)
        return outcomes

    def _kept(self, saving: Reservation, failed: Mapping[int, str]) -> list[Slab | None]:
        """Its slabs but those of ``failed`` and removed keys, whose places are given back."""
        space, kept = saving.space, list(saving.slabs)
        for at, slab in enumerate(kept):
            key = saving.keys[at]
            void = key in saving.void
            if slab is not None and (void or at in failed):
                if not void:
                    del space.pending[key]
                outcome = saving.outcomes[at] = REMOVED if void else failed[at]
                self._not_saved[outcome] += 1
                self._free(space.namespace, (slab, saving.indices[at]))
                kept[at] = None
        return kept

    def abort(self, saving: Reservation) -> None:
        """Gives its places back; to be called when nobody copies into them any more. RESERVED becomes EXPIRED."""
        if saving.closed:
            return
        self._let_go(saving)
        space = saving.space
        for at, slab in enumerate(saving.slabs):
            if slab is not None:
                key = saving.keys[at]
                if key not in saving.void:
                    del space.pending[key]
                saving.outcomes[at] = EXPIRED
                self._not_saved[EXPIRED] += 1
                self._free(space.namespace, (slab, saving.indices[at]))

    # --- ends -----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Reservation | Lease]:
        """Ends what is due. The caller sees to it that nobody copies there any more, then aborts or releases each."""
        if self._ttls and self._ttls[0][0] <= now:
            self._end_values(now)
        due: list[Reservation | Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            held = heappop(self._deadlines)[2]
            if held.closed:
                self._passed -= 1
            elif not held.ended:
                held.ended = True
                due.append(held)  # type: ignore[arg-type] # there are only the two
        return due

    def end_owner(self, owner: Hashable) -> list[Reservation | Lease]:
        """Ends all that this owner holds, for it has gone; the caller goes on as after `expire`."""
        held = self._owners.get(owner, ())
        for one in held:
            one.ended = True
        return list(held)  # type: ignore[arg-type]

    @property
    def next_end(self) -> float:
        """When `expire` will next have something to do, at the earliest; inf: never."""
        deadline = self._deadlines[0][0] if self._deadlines else inf
        return min(deadline, self._ttls[0][0]) if self._ttls else deadline

    def remove(self, space: Space, keys: Iterable[bytes], reason: str = REMOVED) -> int:
        """How many there were, those that are being saved included: those will not be published. Copies go, and do not
        count."""
        count = 0
        for key in keys:
            entry = space.entries.get(key)
            if entry is not None:
                self._drop(entry, reason)
                count += not entry.copy
            elif (saving := space.pending.pop(key, None)) is not None:
                saving.void.add(key)
                count += not saving.copy
        self._counts["removed"] += count
        return count

    def clear(self, namespace: str) -> int:
        """Removes all that a namespace holds, of every geometry; how many there were."""
        known = self._namespaces.get(namespace)
        return sum(map(self._clear, known.spaces)) if known else 0

    def trim(self) -> None:
        """Drops the empty segment that is kept for the next value."""
        self._arena.trim()

    def statistics(self) -> StoreStatistics:
        arena, counts = self._arena, self._counts
        held = [held for owned in self._owners.values() for held in owned]
        return StoreStatistics(
            capacity_bytes=arena.capacity_bytes,
            segments=len(arena.segments),
            segments_bytes=arena.segments_bytes,
            taken_bytes=arena.taken_bytes,
            keys=self._keys - self._copied,
            copies=self._copied,
            copies_bytes=sum(policy.bytes for policy in self._copies),
            pending=sum(len(space.pending) for space in self._spaces.values()),
            leases=sum(isinstance(one, Lease) for one in held),
            hits=counts["hits"],
            hit_bytes=counts["hit_bytes"],
            misses=dict(self._misses),
            saved=counts["saved"],
            saved_bytes=counts["saved_bytes"],
            not_saved=dict(self._not_saved),
            evictions=counts["evictions"],
            evicted_bytes=counts["evicted_bytes"],
            expired=counts["expired"],
            removed=counts["removed"],
            namespaces={
                name: NamespaceStatistics(
                    sum(len(space.entries) for space in namespace.spaces), namespace.bytes, namespace.quota_bytes
                )
                for name, namespace in self._namespaces.items()
            },
        )

    # --- within ---------------------------------------------------------------------------------------------------

    def _why_not(self, space: Space, key: bytes) -> str:
        if key in space.pending:
            return PENDING
        went = self._ghosts.get(hash(key) ^ space.salt)
        return NEVER_SAVED if went is None else EVICTED if went == _EARLY else went

    def _could_hold(self, namespace: Namespace, size: int) -> bool:
        quota = namespace.quota_bytes
        return rounded(size) <= (
            self._arena.capacity_bytes if quota is None else min(quota, self._arena.capacity_bytes)
        )

    def _room_at_once(self, saving: Reservation) -> None:
        """Places for the first of its values, if all are new and of one size: as many as nothing has to go for."""
        space, keys, sizes = saving.space, saving.keys, saving.sizes
        pending, namespace, count = space.pending, space.namespace, len(keys)
        if count < 2 or sizes.count(sizes[0]) < count:
            return
        mine = dict.fromkeys(keys, saving)
        if len(mine) < count or not (space.entries.keys().isdisjoint(mine) and pending.keys().isdisjoint(mine)):
            return
        takes = rounded(sizes[0])
        if namespace.quota_bytes is not None:
            count = max(0, min(count, (namespace.quota_bytes - namespace.bytes) // takes))
        slabs, saving.indices = self._arena.take_all(sizes[0], count, namespace.group)
        saving.slabs += slabs
        saving.outcomes += [RESERVED] * len(slabs)
        namespace.bytes += takes * len(slabs)
        pending.update(mine if len(slabs) == len(keys) else dict.fromkeys(keys[: len(slabs)], saving))

    def _room(self, namespace: Namespace, size: int, copy: bool) -> Spot | None:
        quota = namespace.quota_bytes
        if quota is not None:
            takes = rounded(size)
            if takes > quota:
                return None
            while namespace.bytes + takes > quota:
                if not (self._evict(namespace.copies) or (not copy and self._evict(namespace.policy))):
                    return None
        arena = self._arena
        spot = arena.take(size, namespace.group)
        if spot is None:
            takes = rounded(size)
            if takes > arena.capacity_bytes:
                return None
            gives_up = self._counts["evicted_bytes"] + GIVES_UP * takes + arena.segment_bytes
            while spot is None:
                if self._counts["evicted_bytes"] >= gives_up or not self._evict_some(copy):
                    return None
                spot = arena.take(size, namespace.group)
        namespace.bytes += spot[0].block_bytes
        return spot

    def _evict_some(self, copies_alone: bool = False) -> bool:
        if self._copied and self._evict_one_of(self._copies):
            return True
        return not copies_alone and self._evict_one_of(self._policies)

    def _evict_one_of(self, policies: list[Policy]) -> bool:
        if len(policies) == 1:
            return self._evict(policies[0])
        return any(map(self._evict, sorted(policies, key=lambda policy: -policy.bytes)))

    def _evict(self, policy: Policy | None) -> bool:
        victim = None if policy is None else policy.victim()
        if victim is None:
            return False
        entry, early = victim
        self._counts["evictions"] += 1
        self._counts["evicted_bytes"] += entry.slab.block_bytes
        self._unlink(entry, _EARLY if early else EVICTED)
        self._free(self._spaces[entry.space].namespace, (entry.slab, entry.index))
        return True

    def _drop(self, entry: Entry, reason: str) -> None:
        """It went, but not for room."""
        namespace = self._spaces[entry.space].namespace
        entry.alive = False
        _policy_of(namespace, entry).remove((entry,))
        self._unlink(entry, reason)
        if not entry.pins:
            self._free(namespace, (entry.slab, entry.index))

    def _clear(self, space: Space) -> int:
        """What :meth:`remove` of all its keys does, in a fifth of the time."""
        namespace, entries = space.namespace, list(space.entries.values())
        self._ghosts.put_all(np.fromiter(map(hash, space.entries), np.int64, len(entries)) ^ space.salt, REMOVED)
        space.entries.clear()  # nothing is found any more whose place is free
        free: defaultdict[Slab, list[int]] = defaultdict(list)
        for entry in entries:
            entry.alive = False
            entry.parent = None  # it is of this space too
            if not entry.pins:
                free[entry.slab].append(entry.index)
        for slab, indices in free.items():
            namespace.bytes -= len(indices) * slab.block_bytes
            self._arena.give(slab, *indices)
        copies = [entry for entry in entries if entry.copy] if namespace.copies is not None else []
        if namespace.copies is not None:
            namespace.copies.remove(copies)
        values = [entry for entry in entries if not entry.copy] if copies else entries
        namespace.policy.remove(values)
        if self._ttl_live:
            self._ttl_live -= sum(entry.expires is not None for entry in entries)
            self._forget_ttls()
        self._keys -= len(entries)
        self._copied -= len(copies)
        self._counts["removed"] += len(values)
        return len(values) + self.remove(space, [*space.pending])

    def _unlink(self, entry: Entry, reason: str) -> None:
        space = self._spaces[entry.space]
        entry.alive = False
        del space.entries[entry.key]
        self._keys -= 1
        self._copied -= entry.copy
        self._ghosts.put(hash(entry.key) ^ space.salt, reason, self._keys)
        parent = entry.parent
        if parent is not None:
            entry.parent = None
            parent.children -= 1
            if not parent.children and not parent.pins and parent.alive:
                _policy_of(space.namespace, parent).unheld(parent)
        if entry.expires is not None:
            self._ttl_live -= 1
            if self._ttl_listed > 2 * self._ttl_live + 1024:
                self._forget_ttls()

    def _copies_of(self, namespace: Namespace) -> Policy:
        if namespace.copies is None:
            namespace.copies = self._make_policy()
            self._copies.append(namespace.copies)
        return namespace.copies

    def _free(self, namespace: Namespace, spot: Spot) -> None:
        namespace.bytes -= spot[0].block_bytes
        self._arena.give(*spot)

    def _end_values(self, now: float) -> None:
        while self._ttls and self._ttls[0][0] <= now:
            due = heappop(self._ttls)[2]
            self._ttl_listed -= len(due)
            for entry in reversed(due):
                if entry.alive:
                    self._drop(entry, EXPIRED)
                    self._counts["expired"] += 1

    def _forget_ttls(self) -> None:
        """Entries that went before their time are kept in no list for longer than others make up for."""
        kept = ((expires, serial, [entry for entry in listed if entry.alive]) for expires, serial, listed in self._ttls)
        self._ttls = [one for one in kept if one[2]]
        heapify(self._ttls)
        self._ttl_listed = self._ttl_live

    def _hold(self, held: Held) -> None:
        self._owners.setdefault(held.owner, set()).add(held)
        self._serial += 1
        heappush(self._deadlines, (held.until, self._serial, held))

    def _let_go(self, held: Held) -> None:
        held.closed = True
        owned = self._owners[held.owner]
        owned.discard(held)
        if not owned:
            del self._owners[held.owner]
        self._passed += 1
        if self._passed > 64 and 2 * self._passed > len(self._deadlines):
            self._deadlines = [one for one in self._deadlines if not one[2].closed]
            heapify(self._deadlines)
            self._passed = 0


_SIZE = attrgetter("size")


def _policy_of(namespace: Namespace, entry: Entry) -> Policy:
    copies = namespace.copies
    return copies if entry.copy and copies is not None else namespace.policy


def _touch(namespace: Namespace, entries: list[Entry]) -> None:
    if namespace.copies is None:
        namespace.policy.touch(entries)
        return
    namespace.policy.touch([entry for entry in entries if not entry.copy])
    namespace.copies.touch([entry for entry in entries if entry.copy])
