from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.search.encoding import Encoding
from autofit.search.pruning import ruled_out
from tests.search.proofs import rules_out

VALUES: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": (1, 2, 4, None),
    "gradient_accumulation_steps": (1, 2, 4),
    "optimizer": ("adamw", "adamw-8bit", "sgd"),
    "optimizer_in_backward": (False, True),
}
configs = st.builds(
    Config, st.fixed_dictionaries({knob: st.sampled_from(each) for knob, each in VALUES.items()})
)


def order(knob: str, value: Any) -> int | None:
    if knob == "micro_batch_size":
        return value if isinstance(value, int) else None
    return {"adamw": 2, "adamw-8bit": 1}.get(value) if knob == "optimizer" else None


@given(st.lists(configs, min_size=1, max_size=20), configs)
def test_what_is_asked_of_all_at_once_is_what_is_asked_of_each(
    many: list[Config], other: Config
) -> None:
    columns = Encoding(many)
    assert ruled_out(other, columns, order).tolist() == [
        rules_out(other, each, order) for each in many
    ]
    assert np.array_equal(columns.encoded(many), columns.codes)
    same = columns.encoded([other]) == columns.codes
    assert same.tolist() == [[each[knob] == other[knob] for knob in columns.knobs] for each in many]
    assert columns.where("optimizer", lambda value: value == "sgd").tolist() == [
        c["optimizer"] == "sgd" for c in many
    ]


def test_micro_batches_are_counted_in_doublings() -> None:
    sizes = [Config(micro_batch_size=size) for size in (1, 2, 8, None)]
    assert Encoding(sizes).doublings.tolist() == [0, 1, 3, 0]
    assert not len(Encoding([]).doublings)


def test_what_none_of_them_has_is_told_apart_from_all() -> None:
    columns = Encoding([Config(optimizer_in_backward=False), Config(optimizer_in_backward=True)])
    odd = [
        Config(optimizer_in_backward=1),
        Config(optimizer_in_backward=None),
        Config(optimizer_in_backward=True),
    ]
    assert columns.encoded(odd).tolist() == [[-1], [-1], [1]]
    assert Encoding([]).encoded(odd).shape == (3, 0)
