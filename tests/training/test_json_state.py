"""State travels as JSON, and comes back as what it was."""

import json
import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autofit.training import json_state

Point = namedtuple("Point", ["x", "y"])


def through(value: Any) -> Any:
    return json_state.loads(json.dumps(json_state.encoded(value)))


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            -3,
            2**70,
            0.1,
            math.inf,
            "text \u2028",
            b"\x00\xff",
            (),
            (1, (2, [3])),
            {1, 2},
            frozenset({"a"}),
        ),
        *(
            {},
            {"a": 1},
            {"a": 1, "b": {"tuple": [1]}},
            {1: "a", 2: "b"},
            {(0, 1): None},
            {"dict": []},
            {True: 1, 0: 2},
        ),
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    found = through(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        *(
            torch.arange(6).view(2, 3).t(),
            torch.rand(2, 0),
            torch.tensor(1.5),
            torch.ones(3, dtype=torch.bfloat16),
        ),
        *(
            torch.tensor([True, False]),
            torch.ones(2, dtype=torch.complex128),
            torch.ones(2).to(torch.float8_e4m3fn),
        ),
    ],
    ids=str,
)
def test_tensors(tensor: torch.Tensor) -> None:
    found = through({"order": tensor, "next": 1})["order"]
    assert found.dtype is tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(*(each.flatten().view(torch.uint8) for each in (found, tensor)))
    found.zero_()  # it may be written to


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array("abc"), np.array(3)], ids=str
)
def test_arrays(array: Any) -> None:
    found = through(array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert (found == array).all()
    assert found.flags.writeable


def test_numbers_of_numpy_and_dicts_of_other_kinds() -> None:
    assert type(through(np.float64(0.1))) is np.float64
    assert through(np.int64(3)) == 3
    assert through(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((Path("x"), "PosixPath"), (len, "builtin_function_or_method"), (Point(1, 2), "Point")),
        *(
            ([1, {"a": object()}], "object"),
            (np.array([object()]), "ndarray"),
            (torch.eye(2).to_sparse(), "Tensor"),
        ),
    ],
    # the same in every worker
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_does_not_travel_is_named(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=kind):
        json_state.encoded(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            '{"a": 1}',
            '{"tensor": 1}',
            '{"tensor": ["load", [1], "AAAA"]}',
            '{"tensor": ["nn", [1], "AAAA"]}',
        ),
        *(
            '{"array": ["O", [1], "AAAAAAAAAAA="]}',
            '{"tensor": ["float32", [9], "AAAAAA=="]}',
            '{"bytes": "a"}',
        ),
    ],
)
def test_other_text_is_no_state(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        json_state.loads(text)
