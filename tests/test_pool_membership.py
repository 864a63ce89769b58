"""Members and the list of them that may change."""

import threading

import pytest

import kvferry
from kvferry.pool.membership import Member, Membership, StaticMembership

A, B, C = Member("a", "h:1"), Member("b", "h:2", 2), Member("c", "h:3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("", "h:1"), "id is empty"),
        ((7, "h:1"), "id=7"),
        (("a", ""), "'a' has an empty address"),
        (("a", "h:1", 0), "weight=0"),
        (("a", "h:1", -1.0), "weight=-1.0"),
        (("a", "h:1", float("inf")), "weight=inf"),
        (("a", "h:1", 1e21), "weight=1e"),
        (("a", "h:1", float("nan")), "weight=nan"),
        (("a", "h:1", True), "weight=True"),
        (("a", "h:1", "2"), "weight='2'"),
    ],
)
def test_what_is_no_member_is_refused_by_name(words: "tuple[object, ...]", said: str) -> None:
    with pytest.raises(kvferry.InvalidArgument, match=said):
        Member(*words)  # type: ignore[arg-type]


def test_members_stand_in_the_order_of_their_ids_and_changes_are_told() -> None:
    nodes: Membership = StaticMembership([C, A])
    assert isinstance(nodes, StaticMembership)
    assert nodes.members() == (A, C)
    seen: list[tuple[int, tuple[Member, ...]]] = []
    end = nodes.subscribe(lambda: seen.append((nodes.version, nodes.members())))
    nodes.set([B, A])
    nodes.set((A, B))  # the same
    nodes.set([])
    end()
    end()
    nodes.set([C])
    assert seen == [(1, (A, B)), (2, ())]
    assert nodes.version == 3


def test_a_refused_list_changes_nothing() -> None:
    nodes = StaticMembership([A])
    with pytest.raises(kvferry.InvalidArgument, match=r"two members have the id 'a', at h:1 and at h:9"):
        nodes.set([B, A, Member("a", "h:9")])
    assert (nodes.version, nodes.members()) == (0, (A,))


def test_a_subscriber_may_change_the_list_itself() -> None:
    nodes = StaticMembership()
    nodes.subscribe(lambda: nodes.set([A]))
    nodes.set([B])
    assert (nodes.version, nodes.members()) == (2, (A,))


def test_threads_that_change_the_list_at_once_lose_no_change() -> None:
    nodes = StaticMembership()
    told: list[int] = []
    nodes.subscribe(lambda: told.append(nodes.version))

    def change(name: str) -> None:
        for number in range(200):
            nodes.set([Member(name, f"h:{number}")])

    threads = [threading.Thread(target=change, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert nodes.version == len(told) == 800
    assert 800 in told
