"""Kills and stops by the hundred: pairs of processes that move bytes, and somebody who strikes one of them.

`main` is a program of one thread. It forks a worker for every pair, and a worker forks its two sides, so that a new side
costs a fork and not the start of an interpreter; nobody makes a node before its last fork. The destination lies in memory
that a side shares with its worker: that is looked at without asking anybody, also after the side's death. Each worker
strikes, judges, waits and goes on by itself, so that their waits overlap.

A strike falls when a block drawn by chance has arrived, and a few at any moment. It "fell while bytes were moving" if part
of the bytes, and not all, had come both just before and just after the signal was sent.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvferry
from failure_support import NEW, OLD, REFILL, WHERE, Side, words
from support import frames
from support.child import Child, die_with
from support.peer import _raised

SETTLE_S = 2.0  # for so long nothing may change any more
NOTICED_S = 2.0  # a peer's death is told within this time, on a busy machine too
LATE_S = 1.0  # an answer comes so long after its deadline at most, on a busy machine too
STOP_DEADLINE_S = 0.25
PATIENCE_S = 20.0
SIZES = {"map": (256 << 10, 32), "cma": (16 << 10, 256), "socket": (16 << 10, 512)}
"""Blocks that are moved, and bytes of each: as few as take some milliseconds."""
M_ARENA_MAX = -8  # malloc.h
GROWS = {"mappings": 16, "KiB": 4 << 10}
"""What a side may have more, from one time without a link to the next; of all else not one."""


@dataclass(frozen=True)
class Plan:
    """What is to be done for one transport and one direction, by how many workers."""

    verb: str
    transport: str
    kills: int
    kills_moving: int
    stops: int
    stops_moving: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.verb}-{self.transport}"


def main() -> None:
    """Reads what is to be done from standard input; writes what came of it, a line of JSON for each plan, as they end."""
    die_with(os.getppid())
    given = json.load(sys.stdin)
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # what a thread has freed is given back, so that what is kept can be seen
    gc.freeze()  # whoever looks for garbage after a fork looks at what is its own alone
    plans = [Plan(**plan) for plan in given["plans"]]
    workers, turns = {}, Turns(max(1, (os.cpu_count() or 2) // 2))
    for number in range(max(plan.workers for plan in plans)):
        for plan in plans:
            if number < plan.workers:
                reading, pid = forked(lambda: Worker(plan, number, given["seed"], turns).run())  # noqa: B023 - called at once
                workers[reading] = (plan, pid)
    reports: dict[str, list[Any]] = {plan.name: [] for plan in plans}
    while workers:
        for reading in select.select(list(workers), [], [])[0]:
            plan, pid = workers.pop(reading)
            with os.fdopen(reading, "rb") as answer:
                said = answer.read()
            os.waitpid(pid, 0)
            reports[plan.name].append(pickle.loads(said) if said else {"problem": f"a worker of {plan.name} died"})
            if len(reports[plan.name]) == plan.workers:
                print(json.dumps({"plan": plan.name, "reports": reports[plan.name]}), flush=True)


def forked(work: Any) -> "tuple[int, int]":
    """Does it in a child; where to read its pickled result, and the child's pid."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            die_with(parent)
            result = work()
            with os.fdopen(writing, "wb") as answer:
                answer.write(pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writing)
    return reading, pid


class Turns:
    """So many workers at most do something else than wait: on a machine whose cores are all busy nobody strikes in time."""

    def __init__(self, most: int) -> None:
        self.reading, self.writing = os.pipe()
        os.write(self.writing, b"." * most)

    def __enter__(self) -> None:
        os.read(self.reading, 1)

    def __exit__(self, *_: object) -> None:
        os.write(self.writing, b".")


# --- a side -----------------------------------------------------------------------------------------------------------


class CampaignSide(Side):
    """``shared`` is where the destination lies, ``blocks`` are those that move; both are set before the fork."""

    shared: Any = None
    blocks: Any = None

    def ferry(self, how: str, verb: str, until: float, transport: str) -> Any:
        far, mine = ("source", "destination") if verb == "pull" else ("destination", "source")
        return getattr(self, how)(verb, far, mine, CampaignSide.blocks, until, transport)

    def adopt(self, name: str) -> None:
        """Registers the shared memory, as it is."""
        self.arrays[name] = [CampaignSide.shared]
        self.caches[name] = self.node.register(name, self.arrays[name])

    def end(self, name: str) -> None:
        self.node.unregister(self.caches.pop(name))

    def private_kib(self) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

    def left_behind(self) -> "dict[str, int]":
        self.links.clear()  # one that is over keeps what tells of its peer's death
        found = super().left_behind()
        ctypes.CDLL(None).malloc_trim(0)
        return found | {"KiB": self.private_kib()}

    def alive(self) -> "list[bool]":
        return [link.alive for link in self.node.links]

    def keep_link(self) -> bool:
        """The one that there is, whoever opened it: what is called later is called on it, dead or alive."""
        self.links = self.node.links
        return len(self.links) == 1

    def _link(self) -> Any:
        return self.links[0]

    def unlink(self) -> None:
        self._link().unlink(3000)


class Forked:
    """A side in a fork of the worker: a `Peer` without a thread of its own."""

    def __init__(self, role: str, options: "dict[str, Any]") -> None:
        self.role = role
        self.answers: dict[int, Any] = {}
        self.count = 0
        self.alone: list[dict[str, int]] = []  # what it had of everything, each time it had no link
        self.pipe, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                self.pipe.close()
                die_with(parent)
                Child(theirs).run()
            os._exit(0)
        theirs.close()
        setup = {"path": sys.path, "preload": [], "uid": None, "dumpable": True, "parent": parent}
        frames.send(self.pipe, setup | {"target": "campaign_support:CampaignSide", "arguments": (options,)})
        self.result(0)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.result(self.start(name, *arguments))

    def start(self, name: str, *arguments: Any, thread: bool = False) -> int:
        self.count += 1
        frames.send(self.pipe, (self.count, name, pickle.dumps((arguments, {})), thread))
        return self.count

    def answered(self, number: int) -> bool:
        return number in self.answers or bool(select.select([self.pipe], [], [], 0)[0])

    def result(self, number: int, within_s: float = PATIENCE_S) -> Any:
        until = time.monotonic() + within_s
        while number not in self.answers:
            self.pipe.settimeout(max(until - time.monotonic(), 0.001))
            message = frames.receive(self.pipe)
            self.answers[message["number"]] = message
        message = self.answers.pop(number)
        if "kinds" in message:
            raise _raised(message)
        return pickle.loads(message["value"])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        self.pipe.close()

    def stands_still(self) -> None:
        until(lambda: set(self.thread_states()) <= {"T"}, f"the {self.role} stands still")

    def goes_on(self) -> None:
        self.signal(signal.SIGCONT)
        until(lambda: "T" not in self.thread_states(), f"the {self.role} goes on")

    def thread_states(self) -> "list[str]":
        states = []
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{task}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
        return states


def descriptors(pid: int) -> "list[str]":
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]


def until(reached: Any, what: str, seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.001)


# --- a pair, and who strikes it ---------------------------------------------------------------------------------------


class Worker:
    def __init__(self, plan: Plan, number: int, seed: int, turns: Turns) -> None:
        self.plan, self.number, self.seed, self.turn = plan, number, seed, turns
        self.chance = random.Random(f"{seed} {plan.name} {number}")
        self.counts: Counter[str] = Counter()
        self.answer_s: list[float] = []
        self.event = "the beginning"
        self.over_tcp = plan.transport == "socket" and number % 2 == 0
        self.moved, self.block_bytes = SIZES[plan.transport]
        self.size = 2 * self.moved + 1, self.block_bytes // 8
        memory = mmap.mmap(-1, self.size[0] * self.block_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        CampaignSide.shared = self.memory = np.frombuffer(memory, np.uint64).reshape(self.size)
        CampaignSide.blocks = (np.arange(self.moved), 2 * np.arange(self.moved) + 1)

    def run(self) -> "dict[str, Any]":
        problem = ""
        try:
            with self.turn:
                self.prepare()
                self.a_whole_one()
            while strike := self.next_strike():
                getattr(self, strike)()
            self.end()
        except BaseException:  # noqa: BLE001 - the parent tells of it
            how = f"seed {self.seed}, {self.plan.name}, worker {self.number}: {self.event}; until then {dict(self.counts)}"
            problem = f"{how}\n{traceback.format_exc()}"
        return {"counts": dict(self.counts), "answer_s": self.answer_s, "problem": problem}

    def next_strike(self) -> "str | None":
        """Of what is still to be done, by chance."""
        plan, left = self.plan, {}
        for strike, all_, moving in (("kill", plan.kills, plan.kills_moving), ("stop", plan.stops, plan.stops_moving)):
            share = -(-all_ // plan.workers), -(-moving // plan.workers)
            done = self.counts[f"{strike}s"], self.counts[f"{strike}s while bytes moved"]
            left[strike] = max(share[0] - done[0], share[1] - done[1])
            assert done[0] < 3 * share[0] + 10, f"too few of the {strike}s fall while bytes move: {done}"
        strikes = [strike for strike, count in left.items() if count > 0]
        return self.chance.choices(strikes, [left[strike] for strike in strikes])[0] if strikes else None

    # --- the pair

    def prepare(self) -> None:
        self.fill(OLD)
        self.source, self.destination = self.a_source(), self.a_destination()
        self.link()

    def options(self, last_digit: int) -> "dict[str, Any]":
        made: dict[str, Any] = {"node_id": 1000 + 10 * self.number + last_digit, "copy_threads": 1 + self.number % 3}
        made["pool"] = self.moved * self.block_bytes + (1 << 20)
        return made | ({"transports": ("socket",)} if self.over_tcp else {})

    def a_source(self) -> Forked:
        side = Forked("source", self.options(1))
        side.call("cache", "source", WHERE[self.plan.transport], self.moved, self.block_bytes, NEW)
        return side

    def a_destination(self) -> Forked:
        side = Forked("destination", self.options(2))
        side.call("adopt", "destination")
        return side

    @property
    def actor(self) -> Forked:
        return self.destination if self.plan.verb == "pull" else self.source

    def link(self) -> None:
        """Neither side has more of anything than the last time it was without a link."""
        for side in (self.source, self.destination):
            self.count_what_is_left(side)
        dialler, listener = self.chance.sample([self.source, self.destination], 2)
        dialler.call("link", listener.call("address"))
        for side in (dialler, listener):
            until(lambda: side.call("keep_link"), "the link is up on both sides")  # noqa: B023

    def count_what_is_left(self, side: Forked) -> None:
        """The first link makes what a process then keeps; what the later ones make goes with them."""
        least = (
            {what: min(counted[what] for counted in side.alone[1:]) for what in side.alone[0]} if side.alone[1:] else {}
        )
        end = time.monotonic() + NOTICED_S
        while True:
            now = side.call("left_behind")
            more = {what: (most, now[what]) for what, most in least.items() if now[what] > most + GROWS.get(what, 0)}
            if not more:
                break
            assert time.monotonic() < end, (
                f"the {side.role} has more than it had without a link before: {more}, {sorted(descriptors(side.pid))}"
            )
        side.alone.append(now)
        self.counts["times that what is left was counted"] += bool(least)

    def transfer(self, timeout_s: float) -> int:
        here = self.chance.choice(["move_here", "move"])
        self.deadline = time.monotonic() + timeout_s
        return self.actor.start("ferry", here, self.plan.verb, self.deadline, self.plan.transport, thread=True)

    # --- strikes

    def kill(self) -> None:
        survivor, victim = self.chance.sample([self.source, self.destination], 2)
        self.event = f"the {victim.role} is killed"
        with self.turn:
            moving, while_moving = self.strike_in_the_middle(victim, signal.SIGKILL, PATIENCE_S)
            struck = time.monotonic()
            victim.reap()
            if survivor is self.actor:
                self.judge(self.outcome(moving, kvferry.PeerLost, NOTICED_S))
                self.answer_s.append(time.monotonic() - struck)
            until(lambda: not any(survivor.call("alive")), "the link is down", NOTICED_S)
            if survivor is self.destination and survivor is not self.actor:
                # Nobody has told the owner of the blocks that no more is written; this makes sure.
                survivor.call("end", "destination")
            self.nothing_outside_changed()
            self.fill(REFILL)
        time.sleep(SETTLE_S)
        with self.turn:
            self.is_full_of(REFILL)
            self.counted("kill", victim, while_moving)
            self.fill(OLD)
            if victim is self.destination:
                self.destination = self.a_destination()
            else:
                self.source = self.a_source()
                if survivor is not self.actor:
                    survivor.call("adopt", "destination")
            self.link()
            self.a_whole_one()

    def stop(self) -> None:
        victim = self.chance.choice([self.source, self.destination])
        self.event = f"the {victim.role} is stopped"
        for_a_moment = self.chance.random() < 0.2
        with self.turn:
            moving, while_moving = self.strike_in_the_middle(victim, signal.SIGSTOP, STOP_DEADLINE_S)
            victim.stands_still()
        owner_is_first = False
        if for_a_moment:
            self.event += " for a moment"
            time.sleep(self.chance.uniform(0, 0.05))
            victim.goes_on()
        elif victim is self.actor:
            time.sleep(max(0.0, self.left_s() + 0.1))
            owner_is_first = self.plan.verb == "push" and self.chance.random() < 0.5
            if owner_is_first:  # it waits for nobody: it ends the cache, and may use its blocks at once
                self.destination.call("end", "destination")
                self.nothing_outside_changed()
                self.fill(REFILL)
            victim.goes_on()
        kinds = (kvferry.DeadlineExceeded, kvferry.CacheNotFound) if owner_is_first else kvferry.DeadlineExceeded
        error = self.outcome(moving, kinds, max(0.0, self.left_s()) + LATE_S)
        if victim is not self.actor and not for_a_moment:
            self.answer_s.append(max(0.0, -self.left_s()))
        with self.turn:
            ended = owner_is_first
            if not owner_is_first:
                self.judge(error)
                if victim is self.destination and victim is not self.actor and not for_a_moment:
                    victim.goes_on()  # it may be in the middle of a piece
                ended = self.make_sure_that_nobody_writes(error)
                self.nothing_outside_changed()
                self.fill(REFILL)
            if victim is self.source and victim is not self.actor and not for_a_moment:
                victim.goes_on()
        time.sleep(SETTLE_S)
        with self.turn:
            self.is_full_of(REFILL)
            self.counted("stop", victim, while_moving)
            self.fill(OLD)
            if ended:
                self.destination.call("adopt", "destination")
            if self.chance.random() < 0.5:
                self.unlink_and_link()
            self.a_whole_one()

    def make_sure_that_nobody_writes(self, error: "kvferry.KvferryError | None") -> bool:
        """What the caller does before it fills the blocks again: nothing, if the error says that nobody writes there; else
        it ends the cache, or waits until the deadline has passed at the receiver. Whether the cache has ended."""
        if error is None or error.destination_settled:
            return False
        assert self.plan.verb == "push"
        if self.chance.random() < 0.5:
            self.destination.call("end", "destination")
            return True
        time.sleep(STOP_DEADLINE_S + 0.1)
        return False

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def strike_in_the_middle(self, victim: Forked, number: int, timeout_s: float) -> "tuple[int, bool]":
        moving = self.transfer(timeout_s)
        if self.chance.random() < 0.1:
            end = time.monotonic() + self.chance.uniform(0, 0.004)
            while time.monotonic() < end:
                pass
        else:
            first_words, block = self.memory[1::2, 0], int(self.moved * self.chance.uniform(0, 0.9))
            end = time.monotonic() + STOP_DEADLINE_S
            while first_words[block] < NEW or first_words[block] >= OLD:
                if self.actor.answered(moving) or time.monotonic() > end:
                    break
                os.sched_yield()
        before = self.partly_new()
        victim.signal(number)
        return moving, before and self.partly_new()

    def partly_new(self) -> bool:
        first_words = self.memory[1 :: 2 * (self.moved // 1024), 0]
        new = int(((first_words >= NEW) & (first_words < OLD)).sum())
        return 0 < new < len(first_words)

    def outcome(self, moving: int, kinds: Any, within_s: float) -> "kvferry.KvferryError | None":
        """None, or the error of these kinds, which names everything; in time."""
        begun = time.monotonic()
        try:
            self.actor.result(moving)
        except kvferry.KvferryError as raised:
            error = raised
        else:
            self.counts["arrived"] += 1
            return None
        took = time.monotonic() - begun
        assert took < within_s, f"{type(error).__name__} came after {took:.3f} s: {error}"
        assert isinstance(error, kinds), f"{type(error).__name__}: {error}"
        mine, peer = ("destination", 1) if self.plan.verb == "pull" else ("source", 2)
        said = (error.peer, error.cache, error.operation, str(error))
        assert f"node {1000 + 10 * self.number + peer} " in error.peer, said
        assert mine in error.cache and error.operation == self.plan.verb and str(error), said
        assert error.destination_settled or self.plan.verb == "push", said
        self.counts[f"{type(error).__name__}{', touched' if error.bytes_touched else ''}"] += 1
        return error

    def counted(self, strike: str, victim: Forked, while_moving: bool) -> None:
        self.counts["strikes"] += 1
        self.counts[f"{strike}s"] += 1
        self.counts[f"{strike}s of the {victim.role}"] += 1
        self.counts[f"{strike}s while bytes moved"] += while_moving

    # --- the bytes

    def fill(self, value: int) -> None:
        self.value = value
        self.memory[:] = words(value, self.size[0])

    def is_full_of(self, value: int) -> None:
        same = self.memory == words(value, self.size[0])
        if not same.all():
            wrong = np.nonzero(~same.all(axis=1))[0]
            raise AssertionError(f"{len(wrong)} blocks have changed, the first is {wrong[0]}: {self.memory[wrong[0]]}")

    def nothing_outside_changed(self) -> None:
        same = self.memory[::2] == words(self.value, self.size[0])[::2]
        assert same.all(), "bytes outside the spans have changed"

    def judge(self, error: "kvferry.KvferryError | None") -> None:
        self.nothing_outside_changed()
        if error is None:
            assert (self.memory[1::2] == words(NEW, self.moved)).all(), "it says that all bytes have arrived"
        elif not error.bytes_touched:
            self.is_full_of(self.value)

    def a_whole_one(self) -> None:
        self.event = "a transfer after that"
        self.actor.result(self.transfer(PATIENCE_S))
        self.nothing_outside_changed()
        assert (self.memory[1::2] == words(NEW, self.moved)).all()
        self.fill(OLD)

    def unlink_and_link(self) -> None:
        self.event += ", unlinked"
        one, other = self.chance.sample([self.source, self.destination], 2)
        one.call("unlink")
        for side in (one, other):
            until(lambda: not any(side.call("alive")), f"the link of the {side.role} is down")  # noqa: B023
        self.link()

    def end(self) -> None:
        for side in (self.source, self.destination):
            side.signal(signal.SIGKILL)
            side.reap()
