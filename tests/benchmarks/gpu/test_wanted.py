import pytest

from benchmarks.gpu.wanted import WANTED, verdicts


def test_every_number_of_the_issue_has_a_verdict() -> None:
    assert [(each.stage, each.limit, each.at_least) for each in WANTED] == [
        ("memory", 0.02, False),
        ("memory", 0.08, False),
        ("memory", 0.95, True),
        ("memory", 0.10, False),
        ("search", 0.02, False),
        ("search", 300.0, False),
        ("search", 2, False),
        ("peers", 1.3, True),
        ("speed", 0.45, True),
        ("loop", 0.02, False),
    ]


@pytest.mark.parametrize(
    ("seen", "reached"), [(0.019, True), (0.02, True), (0.021, False), (None, None)]
)
def test_at_most(seen: float | None, reached: bool | None) -> None:
    found = verdicts({"memory": {"allocated median": seen}})[0]
    assert (found.wanted, found.reached) == ("at most 2.0%", reached)
    assert found.seen == (None if seen is None else f"{seen:.1%}")


@pytest.mark.parametrize(("seen", "reached"), [(1.29, False), (1.3, True), (2.0, True)])
def test_at_least(seen: float, reached: bool) -> None:
    found = next(each for each in verdicts({"peers": {"over the best peer": seen}}) if each.seen)
    assert (found.wanted, found.seen, found.reached) == (
        "at least x 1.30",
        f"x {seen:.2f}",
        reached,
    )


def test_what_was_not_measured_is_neither() -> None:
    assert {each.reached for each in verdicts({})} == {None}
