"""What collectives cost, by bytes, ranks and links."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.links import Link, Links
from autofit.distributed.collectives import KINDS, Group, seconds

LINKS = Links(Link("within", 200e9, 3e-6), Link("between", 20e9, 14e-6))
SHARED = Links(LINKS.within, Link("tcp", 20e9, 14e-6, shared=True))
LARGE = 1e9

groups = st.builds(Group, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 16]))


def test_a_large_gathering_moves_what_a_rank_lacks_at_the_links_bandwidth() -> None:
    assert seconds("all_gather", LARGE, Group(8), LINKS) == pytest.approx(
        LARGE * 7 / 8 / 200e9, rel=0.02
    )
    assert seconds("all_reduce", LARGE, Group(8), LINKS) == pytest.approx(
        2 * LARGE * 7 / 8 / 200e9, rel=0.02
    )


def test_cards_with_networks_of_their_own_add_up_between_nodes_up_to_the_link_within() -> None:
    alone = seconds("all_gather", LARGE, Group(1, 2), LINKS)
    assert alone == pytest.approx(LARGE / 2 / 20e9, rel=0.01)
    assert seconds("all_gather", LARGE, Group(4, 2), LINKS) == pytest.approx(
        LARGE * 7 / 8 / 80e9, rel=0.02
    )
    assert seconds("all_gather", LARGE, Group(8, 2), SHARED) == pytest.approx(
        LARGE * 15 / 16 / 20e9, rel=0.02
    )


def test_what_goes_to_all_others_mostly_leaves_the_node() -> None:
    within, across = (
        seconds("all_to_all", LARGE, group, LINKS) for group in (Group(8), Group(8, 2))
    )
    assert within == pytest.approx(LARGE * 7 / 8 / 200e9, rel=0.02)
    assert across == pytest.approx(LARGE / 2 / 20e9, rel=0.02)


def test_small_messages_cost_hops_and_nodes_reduce_in_a_tree() -> None:
    assert seconds("all_gather", 8.0, Group(8), LINKS) == pytest.approx(15e-6 + 7 * 3e-6)
    assert seconds("all_reduce", 8.0, Group(8, 16), LINKS) == pytest.approx(
        15e-6 + 2 * (7 * 3e-6 + 4 * 14e-6)
    )


@given(st.sampled_from(KINDS), groups, st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_bytes_never_take_less_and_one_rank_takes_nothing(
    kind: str, group: Group, one: float, two: float
) -> None:
    less, more = sorted((one, two))
    assert 0 <= seconds(kind, less, group, LINKS) <= seconds(kind, more, group, LINKS)
    assert (seconds(kind, more, group, LINKS) == 0) == (group.size == 1)


@pytest.mark.parametrize("kind", KINDS)
def test_many_sizes_are_told_at_once(kind: str) -> None:
    sizes = np.array([1e3, 1e6, 1e9])
    assert seconds(kind, sizes, Group(8, 2), LINKS).tolist() == [
        pytest.approx(seconds(kind, size, Group(8, 2), LINKS)) for size in sizes.tolist()
    ]
