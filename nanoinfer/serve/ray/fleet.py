"""Which of several replicas takes a request: the one that has its KV, unless it has too much to do."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Sequence

from nanoinfer.serve.ray.digests import PIECE_TOKENS

MAX_DIGESTS = 131_072  # of a replica: 33 million tokens, more than the KV cache of a machine holds
_MOST_LOAD = 1.5  # of the least loaded replica's


class RoutedRequest:
    """What is known of a request before it is sent, to one replica or, if that fails, to another.

    It is an argument of the call that sends it. The router reads it there; the replica gets None in its place.

    Attributes:
        digests: of the pieces of its prompt, in order.
        prompt_tokens, answer_tokens: for which it counts while it waits or runs; those of its prompt that lie at the
            replica do not.
        refused_by: replicas that did not answer it: another one is chosen if there is one.
    """

    def __init__(self, digests: Sequence[int] = (), prompt_tokens: int = 0, answer_tokens: int = 0) -> None:
        self.digests, self.prompt_tokens, self.answer_tokens = digests, prompt_tokens, answer_tokens
        self.refused_by: set[Hashable] = set()
        self._fleet: Fleet | None = None
        self._place: Place | None = None  # the fleet's, as are these
        self._load = 0

    @property
    def replica(self) -> Hashable | None:
        """The replica that was chosen last, until `leave`."""
        return None if self._place is None else self._place.replica

    def leave(self) -> None:
        """Count no longer: it was answered, or nobody waits for it any more. May be called again, on any thread."""
        if self._fleet is not None:
            self._fleet.move(self, None)

    def __reduce__(self) -> tuple:
        return type(None), ()


class Held:
    """The digests that were sent to one replica: those of the last requests, at most `limit`.

    They lie in two sets. When the newer one is half of the limit, it becomes the older one, and what was only in that
    is forgotten. All digests of a request enter together, so of those that are held the ones before are held, too.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._new: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def depth(self, digests: Sequence[int]) -> int:
        """Return how many of a prompt's digests are held, from the first one on."""
        new, old = self._new, self._old
        low, high, middle = 0, len(digests), 1  # most replicas do not even hold the first
        while low < high:
            digest = digests[middle - 1]
            if digest in new or digest in old:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def add(self, digests: Sequence[int]) -> None:
        """Note that a prompt was sent."""
        digests = digests[: self._half]
        if len(self._new) + len(digests) > self._half:
            self._new, self._old = set(), self._new
        self._new.update(digests)


class Place:
    """One replica: its load, tokens that it has to compute; all load that it ever had; digests of what it was sent."""

    def __init__(self, replica: Hashable, limit: int) -> None:
        self.replica, self.held = replica, Held(limit)
        self.load = self.sent = 0


class Fleet:
    """The replicas that there are. Any thread may call it.

    A request goes to the replica that holds most of its prompt among those that may take it: the tokens that all who
    wait and run there have to compute are at most 1.5 times the least loaded replica's, and what it would find there.
    Else to the least loaded one; of several that are, to the one that had the least so far, so that prompts spread.

    Args:
        by_prefix: False: always to the least loaded one.
        max_digests: of each replica; those that were sent last are held.
    """

    def __init__(self, *, by_prefix: bool = True, max_digests: int = MAX_DIGESTS) -> None:
        if max_digests < 2:
            raise ValueError(f"max_digests is {max_digests}, it must be at least 2; by_prefix=False holds none")
        self._by_prefix, self._max_digests = by_prefix, max_digests
        self._places: dict[Hashable, Place] = {}
        self._lock = threading.Lock()

    def keep(self, replicas: Collection[Hashable]) -> None:
        """Note which replicas there are, and forget the others with all that they held."""
        with self._lock:
            before = self._places
            self._places = {one: before.get(one) or Place(one, self._max_digests) for one in replicas}

    def place(self, request: RoutedRequest) -> Hashable:
        """Choose a replica, of at least one, and count the request there, no longer at one that was chosen before."""
        with self._lock:
            request._fleet = self
            self._move(request, None)
            self._move(request, self._choose(request))
            return request.replica

    def move(self, request: RoutedRequest, replica: Hashable | None) -> None:
        """Count a request at another replica than at the one chosen; None, or one that is forgotten: nowhere."""
        with self._lock:
            if request.replica != replica:
                self._move(request, self._places.get(replica))

    def by_load(self) -> list[Place]:
        """Return the replicas, those first that have the least to do."""
        with self._lock:
            return sorted(self._places.values(), key=lambda place: place.load)

    def _choose(self, request: RoutedRequest) -> Place:
        places, refused, digests = self._places.values(), request.refused_by, request.digests
        if refused:
            places = [place for place in places if place.replica not in refused] or places
        least = min(place.load for place in places)
        if self._by_prefix and digests:
            chosen, best, most = None, (0, 0), _MOST_LOAD * least
            for place in places:
                if (depth := place.held.depth(digests)) and place.load <= most + depth * PIECE_TOKENS:
                    rank = depth, -place.load
                    if rank > best:
                        chosen, best = place, rank
            if chosen is not None:
                return chosen
        return min((place for place in places if place.load == least), key=lambda place: place.sent)

    def _move(self, request: RoutedRequest, place: Place | None) -> None:
        if request._place is not None:
            request._place.load -= request._load
        request._place = place
        if place is not None:
            found = place.held.depth(request.digests) * PIECE_TOKENS
            request._load = max(request.prompt_tokens - found, 0) + request.answer_tokens
            place.load += request._load
            place.sent += request._load
            if self._by_prefix:
                place.held.add(request.digests)
