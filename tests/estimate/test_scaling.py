import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import UntraceableError
from autofit.estimate.scaling import Grid, Symbols

SYMBOLS = Symbols.for_sizes([4096, 14336, 128256, 2048])


@given(
    st.integers(1, 4096),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 64),
    st.integers(1, 256),
)
def test_an_amount_grows_with_what_its_traced_value_is_divided_by(
    plain: int, samples: int, rank: int, micro: int, wanted: int
) -> None:
    plain = plain * 2  # what is divided by neither prime
    while plain % SYMBOLS.samples == 0 or plain % SYMBOLS.rank == 0:
        plain += 2
    traced = plain * SYMBOLS.samples**samples * SYMBOLS.rank**rank
    (amount,) = Grid.of([micro], [wanted]).amounts([traced], SYMBOLS)[:, 0]
    assert amount == pytest.approx(plain * micro**samples * wanted**rank)


def test_a_grid_holds_every_pair_with_ranks_changing_fastest() -> None:
    grid = Grid.of([1, 2], [8, 16])
    assert grid.samples.tolist() == [1, 1, 2, 2]
    assert grid.ranks.tolist() == [8, 16, 8, 16]


def test_nothing_stays_nothing() -> None:
    assert not Grid.of([3], [5]).amounts([0, 0], SYMBOLS).any()
    assert Grid.of([3], [5]).amounts([], SYMBOLS).shape == (0, 1)


@given(st.integers(0, 20), st.integers(1, 10_000))
def test_tokens_of_a_chunk_scale_where_there_are_chunks(plain: int, rows: int) -> None:
    traced, grid = 2**plain * SYMBOLS.rows, Grid.of([2, 4], [8])
    assert grid.amounts([traced], SYMBOLS).tolist() == [[traced, traced]]
    chunked = grid.with_chunks([(7 * rows, rows), (14 * rows, 2 * rows)])
    assert chunked.chunks.tolist() == [7, 7]
    assert chunked.amounts([traced], SYMBOLS).tolist() == [
        [2**plain * rows, 2 ** (plain + 1) * rows]
    ]


def test_primes_that_divide_a_size_are_not_chosen() -> None:
    assert Symbols.for_sizes([13 * 11, 17]) == Symbols(19, 23, 29)
    with pytest.raises(UntraceableError, match="primes"):
        Symbols.for_sizes([int(np.prod([13, 11, 17, 19, 23, 29, 31, 37, 41], dtype=np.int64))])
