"""What a search resumes is checked before anything is predicted."""

from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.search.journal import Journal, check_resumable, open_study
from tests.search.test_journal import SAMPLER

SPACE = {"precision": ("bf16", "fp32"), "micro_batch_size": (1, 2, 4)}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Of a search that kept a part of the space."""
    kept = {"precision": ["bf16"], "micro_batch_size": [1, 2]}
    identity = {"model": "m", "sequence_length": 128, "space": kept}
    journal = Journal(tmp_path / "journal.log", identity)
    open_study(journal, SAMPLER)
    return journal


def resumed(journal: Journal, **changes: object) -> Journal:
    identity = {"model": "m", "sequence_length": 128, **changes}
    return Journal(journal.path, identity)


def test_the_same_search_and_a_part_of_its_space_go_on(journal: Journal) -> None:
    check_resumable(resumed(journal), SPACE)
    check_resumable(resumed(journal), {"precision": ("bf16",), "micro_batch_size": (1, 2)})


@pytest.mark.parametrize(
    ("changes", "space", "said"),
    [
        ({"sequence_length": 64}, SPACE, "sequence_length was 128, is 64"),
        ({}, {**SPACE, "precision": ("fp32",)}, r"space.precision was \['bf16'\], is \['fp32'\]"),
        ({}, {"precision": ("bf16",)}, r"space.micro_batch_size was \[1, 2\], is None"),
        ({}, {**SPACE, "loss": ("standard",)}, r"space.loss was None, is \['standard'\]"),
    ],
)
def test_another_length_or_space_is_refused(
    journal: Journal, changes: dict[str, object], space: dict[str, tuple], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_resumable(resumed(journal, **changes), space)


def test_a_journal_that_says_nothing_is_left_to_who_opens_it(tmp_path: Path) -> None:
    check_resumable(Journal(tmp_path / "journal.log", {"model": "m"}), SPACE)
