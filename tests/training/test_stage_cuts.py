"""Where a model is cut into stages: equally long ones, and of those the smallest."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.training.stage_cuts import Sizes, StageSizes, balanced

LORA = Config(
    {
        "precision": "bf16",
        "quantization": "nf4-dq",
        "lora_rank": 16,
        "head_only": False,
        "activation_checkpointing": "full",
        "gradient_accumulation_steps": 16,
        "micro_batch_size": 1,
        "pipeline_schedule": "1f1b",
    }
)
# Llama 3.1 70B with samples of 1024 tokens: the head is as long as a block and a quarter.
LARGE = StageSizes(
    count=2,
    blocks=(Sizes(855_638_016, 16_384),) * 80,
    first=Sizes(1_050_673_152, 0),
    last=Sizes(1_050_673_152, 8_192),
    passed=1024 * 8192,
)


@pytest.mark.parametrize(
    ("work", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1 + 2], 2, [0, 3, 4]),  # with a head
        ([1, 1, 1], 2, [0, 1, 3]),  # earlier parts are smaller
        ([5, 1, 1, 1], 3, [0, 1, 2, 4]),
        ([1, 1, 1], 3, [0, 1, 2, 3]),
    ],
)
def test_the_largest_part_is_as_small_as_can_be(
    work: list[int], parts: int, cuts: list[int]
) -> None:
    assert balanced(work, parts) == cuts


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 9), min_size=12, max_size=12),
    st.data(),
)
def test_memory_decides_among_parts_that_are_equally_long(
    work: list[int], held: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(work)))

    def nbytes(start: int, stop: int, number: int) -> float:
        return sum(held[start:stop]) * (1.0 + number)

    def longest(cuts: list[int]) -> int:
        return max(sum(work[start:stop]) for start, stop in pairwise(cuts))

    def largest(cuts: list[int]) -> float:
        return max(nbytes(*each, number) for number, each in enumerate(pairwise(cuts)))

    by_time = balanced(work, parts)
    found = balanced(work, parts, nbytes)
    assert found[0] == 0
    assert found[-1] == len(work)
    assert all(start < stop for start, stop in pairwise(found))
    assert longest(found) <= 1.02 * longest(by_time)
    assert largest(found) <= largest(by_time)


def test_stages_of_a_large_model_need_as_much_as_one_another() -> None:
    """The head takes time and memory, the embedding memory alone; the first stage has two
    micro-batches under way."""
    assert balanced([1.0] * 79 + [2.23], 2) == [0, 41, 80]  # by time alone
    assert LARGE.cuts(LORA) == [0, 40, 80]

    # Where plain blocks keep much, the first stage would be far smaller; time is worth more.
    plain = LORA.replace(activation_checkpointing="none")
    assert LARGE.cuts(plain) == [0, 40, 80]
    twice = replace(LARGE, blocks=LARGE.blocks * 2)
    assert twice.cuts(plain) == [0, 79, 160]


def test_weights_that_are_trained_weigh_more() -> None:
    whole = LORA.replace(lora_rank=0, quantization="none")
    sizes = Sizes(1000, 10)
    assert sizes.nbytes(LORA, in_block=True) == pytest.approx(520 + 20)
    assert sizes.nbytes(LORA, in_block=False) == 2020
    assert sizes.nbytes(whole, in_block=True) == 1010 * 12
    assert sizes.nbytes(whole.replace(precision="fp32"), in_block=True) == 1010 * 16
