"""Which replica a request goes to: a random fleet beside a plain one that compares texts."""

import pickle
import random

import pytest

from nanoinfer.serve.ray.digests import PIECE_TOKENS
from nanoinfer.serve.ray.fleet import Fleet, Held, RoutedRequest


def make_fleet(*replicas, **arguments):
    fleet = Fleet(**arguments)
    fleet.keep(replicas)
    return fleet


def loads(fleet):
    return {place.replica: place.load for place in fleet.by_load()}


def common(first, second):
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


class Plain:
    """The same rule over whole prompts: lists of pieces that were sent, by replica."""

    def __init__(self):
        self.sent, self.tokens = {}, {}

    def keep(self, replicas):
        self.sent = {one: self.sent.get(one, []) for one in replicas}
        self.tokens = {one: self.tokens.get(one, 0) for one in replicas}

    def allowed(self, pieces, replicas):
        """What may be chosen: those that hold most, of all that may take it; without any, the least loaded ones."""
        least = min(self.tokens[one] for one in replicas)
        found = {one: max((common(pieces, sent) for sent in self.sent[one]), default=0) for one in replicas}
        mild = [one for one in replicas if found[one]]
        mild = [one for one in mild if self.tokens[one] <= 1.5 * least + found[one] * PIECE_TOKENS]
        most = max((found[one] for one in mild), default=0)
        best = [one for one in mild if found[one] == most] or replicas
        lightest = min(self.tokens[one] for one in best)
        return {one for one in best if self.tokens[one] == lightest}


@pytest.mark.parametrize("seed", range(6))
def test_a_random_fleet_chooses_as_the_rule_over_whole_texts_says(seed):
    draw, plain, fleet = random.Random(seed), Plain(), Fleet()
    prompts, running, num_stayed, new_name = [[]], [], 0, 3
    names = [0, 1, 2]
    fleet.keep(names), plain.keep(names)
    for number in range(400):
        if draw.random() < 0.02:  # one dies, another comes
            names = [*draw.sample(names, len(names) - (len(names) > 1)), *([new_name] if draw.random() < 0.6 else [])]
            new_name += 1
            fleet.keep(names), plain.keep(names)
        begun = draw.choice(prompts)
        pieces = begun[: draw.randrange(len(begun) + 1)] + [draw.randrange(2**64) for _ in range(draw.randrange(4))]
        refused = {one for one in names if draw.random() < 0.1}
        request = RoutedRequest(pieces, draw.randrange(2000), draw.randrange(300))
        request.refused_by = set(refused)
        allowed = plain.allowed(pieces, [one for one in names if one not in refused] or names)
        chosen = fleet.place(request)
        assert chosen in allowed and request.replica == chosen, (number, allowed)
        num_stayed += chosen in [
            one for one, sent in plain.sent.items() if max((common(pieces, s) for s in sent), default=0)
        ]
        found = max((common(pieces, sent) for sent in plain.sent[chosen]), default=0)
        load = max(request.prompt_tokens - found * PIECE_TOKENS, 0) + request.answer_tokens
        plain.sent[chosen].append(pieces)
        plain.tokens[chosen] += load
        prompts.append(pieces)
        running.append((request, load, chosen))
        while running and draw.random() < 0.5:
            request, load, at = running.pop(draw.randrange(len(running)))
            request.leave()
            if at in plain.tokens:
                plain.tokens[at] -= load
        assert loads(fleet) == plain.tokens
    assert num_stayed > 50
    for request, *_ in running:
        request.leave()
    assert set(loads(fleet).values()) == {0}


def test_a_session_alone_always_stays_and_others_spread():
    fleet, session = make_fleet("a", "b"), []
    others = [RoutedRequest([1000 + number], 10) for number in range(20)]
    chosen = []
    for other in others:
        chosen.append(fleet.place(other))
        other.leave()
    assert chosen == ["a", "b"] * 10, "of two without load, the one that was sent less"
    for turn in range(1, 6):
        request = RoutedRequest(list(range(8 * turn)), 100_000)
        session.append(fleet.place(request))
        request.leave()
    assert len(set(session)) == 1


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_replica_with_too_much_to_do_gives_the_session_away(beyond):
    fleet, most = make_fleet("a", "b"), 150 + 2 * PIECE_TOKENS  # 1.5 times the other's, and what is found
    assert fleet.place(RoutedRequest([1, 2], most, beyond)) == "a"
    assert fleet.place(RoutedRequest([9], 100)) == "b"
    assert [fleet.place(RoutedRequest([1, 2, *new], 0)) for new in ([3], [4])] == ["ab"[beyond]] * 2


def test_without_prefixes_the_least_loaded_replica_is_chosen_and_nothing_is_held():
    fleet = make_fleet("a", "b", by_prefix=False)
    fleet.place(RoutedRequest([1], 5))
    assert fleet.place(RoutedRequest([1], 6)) == "b" and fleet.place(RoutedRequest([1], 0)) == "a"
    assert [len(place.held) for place in fleet.by_load()] == [0, 0]


def test_a_replica_that_refused_is_chosen_only_where_there_is_no_other():
    fleet, request = make_fleet("a", "b"), RoutedRequest([1, 2, 3], 0, 7)
    assert fleet.place(request) == "a"
    request.refused_by.add("a")
    assert fleet.place(request) == "b" and loads(fleet) == {"a": 0, "b": 7}
    request.refused_by.add("b")
    assert fleet.place(request) in "ab" and sum(loads(fleet).values()) == 7


def test_what_a_request_finds_is_no_load():
    fleet = make_fleet("a")
    for answer, wanted in ((7, 1000 + 7), (7, 1000 - 2 * PIECE_TOKENS + 7), (0, 1000 - 2 * PIECE_TOKENS)):
        request = RoutedRequest([1, 2, 1000 + wanted], 1000, answer)
        fleet.place(request)
        assert loads(fleet) == {"a": wanted}
        request.leave()
    fleet.place(RoutedRequest([1, 2], 100))
    assert loads(fleet) == {"a": 0}, "never less than nothing"


def test_a_request_counts_where_it_was_sent_and_leaves_once():
    fleet, request = make_fleet("a", "b"), RoutedRequest([1], 7)
    fleet.place(request)
    fleet.move(request, "b")
    assert loads(fleet) == {"a": 0, "b": 7} and request.replica == "b"
    fleet.keep(["a"])  # b died; one of the same name is another one
    fleet.keep(["a", "b"])
    request.leave()
    request.leave()
    assert loads(fleet) == {"a": 0, "b": 0} and request.replica is None
    RoutedRequest().leave()  # that was never sent


def test_what_a_replica_held_is_forgotten_when_it_dies():
    fleet = make_fleet("a", "b")
    assert fleet.place(RoutedRequest([1, 2], 0)) == "a"
    fleet.keep(["b", "c"])
    fleet.place(RoutedRequest([3], 0))
    fleet.keep(["a", "b", "c"])
    assert {place.replica: len(place.held) for place in fleet.by_load()} == {"a": 0, "b": 1, "c": 0}


def test_what_is_held_is_bounded_and_is_what_was_sent_last():
    draw, held, sent = random.Random(2), Held(100), []
    for _ in range(500):
        begun = draw.choice(sent[-20:])[: draw.randrange(8)] if sent else []
        sent.append(begun + [draw.randrange(2**64) for _ in range(draw.randrange(1, 8))])
        held.add(sent[-1])
        assert len(held) <= 100 and held.depth(sent[-1]) == len(sent[-1])
        for digests in sent[-30:]:
            depth = held.depth(digests)
            known = [held.depth([one]) == 1 for one in digests]
            assert known == [True] * depth + [False] * (len(digests) - depth), "those before are held, too"
    assert sum(held.depth(digests) == len(digests) for digests in sent[-6:]) == 6
    assert held.depth(sent[0]) == 0
    held.add(range(1000))
    assert held.depth(range(1000)) == 50 and len(held) <= 100


def test_a_replica_gets_nothing_in_place_of_what_routes_a_request():
    request = RoutedRequest([1], 2)
    make_fleet("a").place(request)
    assert pickle.loads(pickle.dumps(request)) is None


def test_a_limit_that_could_hold_nothing_is_refused():
    with pytest.raises(ValueError, match="max_digests is 1, it must be at least 2"):
        Fleet(max_digests=1)
