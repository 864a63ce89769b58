"""The scheduler's side: what a request can have from elsewhere, what its steps save, and when its blocks may be reused.

Knows requests, blocks, tokens and steps as plain values; never sees a tensor, never waits for the pool, and imports no
vLLM. Driven by the façade, on the engine's thread. ``now`` is the clock it is given.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvferry import InvalidArgument, KvferryError, Pool
from kvferry.connectors.vllm import handed
from kvferry.connectors.vllm.breaker import Breaker
from kvferry.connectors.vllm.counts import Counts
from kvferry.connectors.vllm.identity import extend_keys, of_rank, prompt_digest
from kvferry.connectors.vllm.orders import Load, Orders, Place, Pull, Receive, Report, Save, Send
from kvferry.connectors.vllm.pace import Pace
from kvferry.connectors.vllm.pools import SICK, open_pool, stand_ins
from kvferry.connectors.vllm.requests import Asked, Offer, Request, Step
from kvferry.connectors.vllm.settings import Settings, Wishes

__all__ = ["SchedulerSide"]

log = logging.getLogger("kvferry.vllm")

SHORTEST_MS = 20  # what a wait may take, however fast the engine computes


class SchedulerSide:
    """``model``: what makes blocks of equal tokens differ, apart from their shape. ``saves``, ``hands_over``, ``takes_over``:
    what the engine's role allows."""

    def __init__(
        self,
        settings: Settings,
        *,
        block_tokens: int,
        model: str,
        engine_id: str = "",
        saves: bool = True,
        hands_over: bool = True,
        takes_over: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._block_tokens, self._model, self._engine_id = settings, block_tokens, model, engine_id
        self._saves = saves and not settings.pool_off
        self._hands_over = hands_over and settings.handover
        self._takes_over = takes_over and settings.handover
        self._now = now
        self._pool: Pool | None = None
        self._windows: handed.Windows | None = None
        self._world = 1
        self._place: Place | None = None
        self._breaker = Breaker(settings.revive_ms / 1000)
        self._pace = Pace()
        self.counts = Counts()
        self._requests: dict[str, Request] = {}
        self._saving: dict[int, tuple[str, int]] = {}  # save: its request, and how many workers are still at it
        self._number = 0
        self._computed = False  # the last step has, so that the engine may have more at once
        self._orders = Orders()
        self._said: set[str] = set()

    def placed(self, places: Mapping[int, Place]) -> None:
        """What the workers have registered, by rank; before the first request.

        :raises InvalidArgument: workers whose blocks are not alike.
        """
        place = places[min(places)]
        for rank, other in places.items():
            if other.geometry != place.geometry:
                raise InvalidArgument(f"worker 0 has blocks of {place.geometry}, worker {rank} of {other.geometry}")
        self._world, self._place = len(places), place
        self._model = f"{self._model} {place.geometry} of {self._world}"
        if not self._settings.pool_off:
            self._pool = open_pool(self._settings)
            self._pool.register(stand_ins(place))
        if self._hands_over:
            self._windows = handed.Windows([places[rank] for rank in sorted(places)], self._settings)

    @property
    def is_placed(self) -> bool:
        return self._place is not None

    # --- a request comes ---------------------------------------------------------------------------------------------

    def began(self, asked: Asked) -> None:
        try:
            wishes = Wishes.read_from(asked.params)
        except (
            InvalidArgument
        ) as error:  # it is computed like any other; what it asks for is not known, so nothing is shared
            log.warning("request %s is neither read from the pool nor stored: %s", asked.id, error)
            wishes = Wishes(store=False, read=False)
        if asked.whole:
            wishes = replace(wishes, read=False)
        if self._place is None:  # the workers have not said what they have: this request shares nothing
            wishes = Wishes(store=False, read=False)
        salt = f"{len(wishes.tenant)} {wishes.tenant} {asked.salt}".encode("utf-8", "surrogatepass")
        request = Request(asked, wishes, salt, f"{self._model} {asked.adapter}")
        params = asked.params or {}
        request.hands_over = self._windows is not None and bool(params.get("do_remote_decode"))
        if request.hands_over and params.get("kvferry_push"):
            request.pushed_as = self._push_name(params["kvferry_push"])
            request.hands_over = bool(request.pushed_as)  # nobody comes for a window over what is to be pushed
        if params.get("do_remote_prefill") and self._takes_over and self._place is None:
            self.counts.add("handovers", "not_ready")
        elif params.get("do_remote_prefill") and self._takes_over:
            try:
                request.handed = handed.read(params)
                if request.handed.pushed_as:
                    self._expect_push(request)
            except InvalidArgument as error:
                self._say(f"A request that another instance has prefilled is computed again: {error}")
                self.counts.add("handovers", "not_understood")
        self._requests[asked.id] = request
        if request.handed is not None:
            why = self._unlike(request)
            if why:
                self._say(f"A request that another instance has prefilled is computed again: {why}")
                self.counts.add("handovers", "unlike")
                self._let_go(request)
        if request.handed is not None and asked.whole:
            self.counts.add("handovers", "not_wanted")
            self._let_go(request)
        if request.handed is None:
            self._look(request)

    def _push_name(self, name: Any) -> str:
        """``""`` where the request is not pushed: whoever waits for it computes."""
        if not self._settings.push:
            self._say('A request is to be pushed, and this instance pushes none: set "push": true on both')
        elif not isinstance(name, str):
            self._say(f"A request is not pushed: kvferry_push is {name!r}; give a string")
        elif any(other.pushed_as == name for other in self._requests.values()):
            self._say("A request is not pushed: another one is being pushed by its name; give each a name of its own")
        else:
            return name
        return ""

    def _expect_push(self, request: Request) -> None:
        """:raises InvalidArgument: this instance takes none."""
        assert request.handed is not None and self._place is not None
        if not self._settings.push:
            request.handed = None
            raise InvalidArgument('it is to be pushed, and this instance takes no pushes: set "push": true on both')
        host, _, port = request.handed.addresses[0].rpartition(":")
        addresses = [f"{host}:{int(port) + rank}" for rank in range(self._world)]
        tokens = len(request.asked.tokens)
        digest = prompt_digest(request.asked.tokens)
        request.handed = replace(
            request.handed,
            addresses=addresses,
            windows=[b""] * self._world,
            tokens=tokens,
            geometry=self._place.geometry,
            model=request.model,
            prompt=digest,
        )

    def _unlike(self, request: Request) -> str:
        assert request.handed is not None and self._place is not None
        if len(request.handed.windows) != self._world:
            return (
                f"it ran on {len(request.handed.windows)} tensor-parallel workers and this one has {self._world}; unequal "
                "tensor-parallel sizes are not supported"
            )
        if request.handed.geometry != self._place.geometry:
            return f"its blocks are {request.handed.geometry}, those here {self._place.geometry}"
        if request.handed.model != request.model:
            return (
                "it runs another model, revision, type or adapter (compare --model, --revision and --dtype of the two)"
            )
        if request.handed.prompt != prompt_digest(request.asked.tokens[: request.handed.tokens]):
            return "it was made of other tokens (compare the tokenizers and chat templates of the two)"
        return ""

    def _look(self, request: Request) -> None:
        """Asks the pool for all full blocks that need not be computed, without waiting."""
        if request.looked or request.looking is not None:
            return
        reason = self._not_looked_for(request)
        now = self._now()
        if not reason and not self._breaker.may_ask(now):
            reason = "breaker"
        full = (len(request.asked.tokens) - 1) // self._block_tokens
        if reason or full <= 0:
            request.looked, request.why_absent = True, reason or "short"
            return
        assert self._pool is not None
        self._extend(request, full)
        keys = [key for rank in range(self._world) for key in of_rank(request.keys[:full], rank, self._world)]
        wait_ms = self._wait_ms(self._settings.lookup_timeout_ms, full * self._block_tokens)
        try:
            request.looking = self._pool.exists_async(keys, timeout_ms=wait_ms)
        except KvferryError as error:  # no thread, no descriptor: it is computed
            self._say(f"The pool is not asked: {error}")
            request.looked, request.why_absent = True, "error"
        request.look_until = now + wait_ms / 1000

    def _wait_ms(self, most_ms: int, tokens: int) -> int:
        """How long to wait for so many tokens."""
        return min(most_ms, max(SHORTEST_MS, self._pace.ms(tokens))) if self._settings.bounded else most_ms

    def _not_looked_for(self, request: Request) -> str:
        if self._pool is None:
            return "pool_off" if self._settings.pool_off else "not_ready"
        if request.asked.unkeyed:
            return request.asked.unkeyed
        return "" if request.wishes.read else "not_wanted"

    def _extend(self, request: Request, full: int) -> None:
        tokens, size = request.asked.tokens, self._block_tokens
        extend_keys(request.keys, tokens, full, size, request.model, request.salt)
        request.present.extend([False] * (full - len(request.present)))

    def matched(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be had from elsewhere; None: not known yet, ask again."""
        request = self._requests[request_id]
        if request.handed is not None:
            tokens = min(request.handed.tokens, len(request.asked.tokens)) - computed
            request.offer = Offer(computed, max(tokens, 0), request.handed, "")
            return (tokens, True) if tokens > 0 else (0, False)
        self._look(request)
        if request.looking is not None and not self._heard(request):
            return None, False
        first, size = computed // self._block_tokens, self._block_tokens
        usable = (len(request.asked.tokens) - 1) // size
        end = first
        while end < min(usable, len(request.present)) and request.present[end]:
            end += 1
        if not request.wishes.read:
            end = first
        request.offer = Offer(computed, (end - first) * size, None, request.why_absent or "absent")
        return (end - first) * size, end > first

    def _heard(self, request: Request) -> bool:
        """Whether the pool has said what it has, or is not waited for any longer."""
        looking, now = request.looking, self._now()
        assert looking is not None
        full = len(request.present)
        if looking.done():
            outcome = looking.wait(0)
            ok = outcome.ok.tolist()
            count = len(ok) // self._world
            request.present[:count] = [all(ok[block::count]) for block in range(count)]
            missing = next((word for word in outcome.outcomes if word not in ("hit", "never_saved")), "")
            request.why_absent = missing
            # Of several nodes one may be dead, which costs its keys; one that stands still costs everybody's time.
            self._answered("timeout" not in outcome.reasons and not SICK.issuperset(outcome.reasons), now)
            self.counts.add("seconds", "looking", outcome.seconds)
        elif now >= request.look_until:
            looking.cancel()
            request.present[:] = [False] * full
            request.why_absent = "timeout"
            self._answered(False, now)
        else:
            return False
        request.looking, request.looked = None, True
        return True

    def _answered(self, well: bool, now: float) -> None:
        if well:
            self._breaker.went_well()
            return
        opened = self._breaker.opened
        self._breaker.failed(now)
        if self._breaker.opened > opened:
            self.counts.add("breaker", "opened")
            log.warning("the pool does not answer; it is left alone for a while, and requests are computed")

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def allocated(self, request_id: str, blocks: list[int], external: int) -> None:
        """The engine has taken ``external`` of the tokens that it was offered, and gives the request these blocks."""
        request = self._requests[request_id]
        request.blocks = list(blocks)
        offer, request.offer = request.offer, None
        if offer is None:  # the second time, after a load
            return
        size = self._block_tokens
        first = offer.computed // size
        if offer.handed is not None:
            count = -(-(offer.computed + external) // size) - first if external else 0
            self._pull(request, offer.handed, first, count)
        elif external:
            count = external // size
            keys, into = request.keys[first : first + count], request.blocks[first : first + count]
            wait_ms = self._wait_ms(self._settings.load_timeout_ms, external)
            self._orders.loads.append(Load(request_id, keys, into, wait_ms))
            request.loading = (first, count)
        if offer.handed is None and not request.counted:
            request.counted = True
            missed = (len(request.asked.tokens) - 1) // size - first - external // size
            self.counts.add("tokens_missed", offer.why, max(missed, 0) * size)

    def _pull(self, request: Request, there: "handed.Handed", first: int, count: int) -> None:
        request.handed = None  # once; should it fail, the pool may have it, else it is computed
        if there.pushed_as:
            self._receive(request, there, first, request.blocks[first : first + count])
            return
        theirs, mine = there.blocks[first : first + count], request.blocks[first : first + count]
        wait_ms = self._settings.pull_timeout_ms
        self._orders.pulls.append(
            Pull(request.asked.id, there.addresses, there.windows, theirs, mine, there.geometry, wait_ms)
        )
        if count:
            request.loading = (first, count)

    def _receive(self, request: Request, there: "handed.Handed", first: int, blocks: list[int]) -> None:
        wait_ms = self._settings.push_timeout_ms
        self._orders.receives.append(
            Receive(
                there.pushed_as,
                request.asked.id,
                there.addresses,
                first,
                blocks,
                there.geometry,
                there.model,
                there.prompt,
                wait_ms,
            )
        )
        if blocks:
            request.loading = (first, len(blocks))

    def _let_go(self, request: Request) -> None:
        """Nobody will come for what another instance holds for this request: it may reuse its blocks."""
        there, request.handed = request.handed, None
        if there is not None and there.pushed_as:
            self._receive(request, there, 0, [])
        elif there is not None:
            self._orders.pulls.append(Pull("", there.addresses, there.windows, [], [], there.geometry, 1000))

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Orders:
        """What the workers are to do beside this step, and after it."""
        orders, self._orders = self._orders, Orders()
        now = self._now()
        orders.tokens = step.tokens
        orders.idle = not step.tokens and not self._computed and not self._asks_the_pool()
        self._computed = step.tokens > 0
        for request_id in step.preempted:
            self._preempted(request_id, orders)
        storing = self._saves and self._pool is not None
        for scheduled in step.scheduled:
            request = self._requests.get(scheduled.id)
            if request is None:
                continue
            if scheduled.all_blocks:
                request.blocks = []
            request.blocks += scheduled.blocks
            if request.pushed_as:
                self._send(request, scheduled.computed_after, orders)
            if storing:
                self._save(request, scheduled.computed_after, orders, now)
        return orders

    def _asks_the_pool(self) -> bool:
        return any(request.looking is not None for request in self._requests.values())

    def _send(self, request: Request, computed: int, orders: Orders) -> None:
        prompt, size = request.asked.prompt_tokens, self._block_tokens
        complete = computed >= prompt
        whole = -(-prompt // size) if complete else computed // size
        request.digest = request.digest or prompt_digest(request.asked.tokens[:prompt])
        blocks = request.blocks[: -(-prompt // size)]
        orders.sends.append(
            Send(request.pushed_as, request.asked.id, blocks, whole, complete, request.model, request.digest)
        )

    def _save(self, request: Request, computed: int, orders: Orders, now: float) -> None:
        # Tokens that are not known yet (speculated ones, and those of a step still in flight) name no block.
        full = min(computed, len(request.asked.tokens)) // self._block_tokens
        if full <= request.saved or not request.wishes.store or request.asked.unkeyed:
            return
        first, request.saved = request.saved, full
        if not self._breaker.closed and not self._breaker.may_ask(now):
            self.counts.add("blocks_saved", "breaker", full - first)
            return
        self._extend(request, full)
        chosen = [i for i in range(first, full) if not request.present[i] and request.blocks[i] != 0]
        if not chosen:
            return
        self._number += 1
        keys, blocks = [request.keys[i] for i in chosen], [request.blocks[i] for i in chosen]
        orders.saves.append(Save(self._number, request.asked.id, keys, blocks, request.wishes.ttl_ms))
        request.saves.add(self._number)
        self._saving[self._number] = (request.asked.id, self._world)

    def _preempted(self, request_id: str, orders: Orders) -> None:
        """Its blocks are others' from this step on."""
        orders.ended.add(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return
        request.blocks, request.loading, request.offer = [], None, None
        request.saved = 0
        request.looked = False

    def reported(self, report: Report) -> None:
        """What has ended in the workers."""
        now = self._now()
        self._pace.took(*report.pace)
        for number, workers in report.saves.items():
            request_id, left = self._saving[number]
            if left > workers:
                self._saving[number] = (request_id, left - workers)
                continue
            del self._saving[number]
            request = self._requests.get(request_id)
            if request is not None:
                request.saves.discard(number)
        for request_id, loaded in report.blocks_loaded.items():
            self._loaded(request_id, loaded, report)
        late = sick = answered = False
        for name, count in report.words.items():
            what, _, word = name.partition(" ")
            self.counts.add(what, word, count)
            if what in ("blocks_loaded", "blocks_saved"):
                sick |= word in SICK
                late |= word == "timeout"
                answered |= word not in SICK and word != "cancelled"
        if sick or answered:
            self._answered(answered and not late, now)
        for name, seconds in report.seconds.items():
            self.counts.add("seconds", name, seconds)

    def _loaded(self, request_id: str, loaded: int, report: Report) -> None:
        request = self._requests.get(request_id)
        source = "handover" if request_id in report.pulled else "pool"
        if request is None or request.loading is None:
            return
        (first, count), request.loading = request.loading, None
        size = self._block_tokens
        whole = min(count * size, len(request.asked.tokens) - first * size)
        used = whole if loaded >= count else loaded * size
        self.counts.add("tokens_used", source, used)
        self.counts.add("tokens_missed", report.why.get(request_id, "absent"), whole - used)
        if source == "pool":  # what was not there after all is computed, and saved again
            request.present[first + loaded :] = [False] * (len(request.present) - first - loaded)
            request.saved = min(request.saved, first + loaded)

    # --- a request goes ----------------------------------------------------------------------------------------------

    def finished(
        self, request_id: str, blocks: list[int], computed: int, whole: bool
    ) -> tuple[bool, dict[str, object] | None]:
        """Whether its blocks must stay until the workers report it, and what its answer says about them. ``whole``: it was
        not aborted."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False, None
        if request.looking is not None:
            request.looking.cancel()
        if request.handed is not None:
            self._let_go(request)
        if request.loading is not None:
            self._orders.ended.add(request_id)  # the engine itself keeps the blocks until the load is reported
            return False, None
        if request.pushed_as:
            self._orders.sent[request.pushed_as] = whole and computed >= request.asked.prompt_tokens
            self._orders.awaited.add(request_id)
            return True, None
        if whole and request.hands_over and self._windows is not None:
            params = self._hand_over(request, blocks, computed)
            if params is not None:
                self._orders.awaited.add(request_id)
                return True, params
        if request.saves:
            self._orders.awaited.add(request_id)
            return True, None
        return False, None

    def _hand_over(self, request: Request, blocks: list[int], computed: int) -> dict[str, object] | None:
        assert self._windows is not None and self._place is not None
        tokens = min(computed, request.asked.prompt_tokens)
        theirs = blocks[: -(-tokens // self._block_tokens)]
        if not theirs:
            return None
        try:
            windows = self._windows.open(request.asked.id, theirs)
        except KvferryError as error:
            self._say(f"A request is not handed over: {error}")
            self.counts.add("handovers", "no_window")
            return None
        self.counts.add("handovers", "offered")
        return handed.write(
            self._windows.addresses,
            windows,
            theirs,
            tokens,
            self._place.geometry,
            request.model,
            prompt_digest(request.asked.tokens[:tokens]),
            self._engine_id,
            request.asked.id,
        )

    @property
    def busy(self) -> bool:
        """Something is to be told to the workers although no request is there."""
        return bool(self._orders)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._windows is not None:
            self._windows.close()

    def _say(self, sentence: str) -> None:
        """Each thing once."""
        if sentence not in self._said and len(self._said) < 1000:
            self._said.add(sentence)
            log.warning("%s", sentence)
