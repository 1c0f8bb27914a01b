"""The number of configs of every space that ships, for the case it is told of."""

import json

from autofit.core.hardware import GIB
from autofit.search import list_spaces
from autofit.spaces import TRAITS, describe_spaces, reference_case
from autofit.training.inspect import inspect_workload


def test_every_space_is_told_of_with_its_size() -> None:
    data = describe_spaces()
    assert json.loads(json.dumps(data)) == data
    rows = {row["name"]: row for row in data["spaces"]}
    assert list(rows) == [space.name for space in list_spaces()]
    assert {"exact", "full", "lora", "qlora", "everything"} == set(rows)
    assert all(row["configs"] > 0 for row in rows.values())
    assert rows["everything"]["configs"] > 50_000
    assert rows["exact"]["configs"] < rows["full"]["configs"] < rows["everything"]["configs"]
    assert "llama-3.1-8b" in data["counted_for"]


def test_the_case_is_the_one_it_says() -> None:
    workload, hardware = reference_case()
    assert hardware.memory_bytes == 24 * GIB
    assert workload.effective_batch_size == 32
    assert inspect_workload(workload, hardware, hardware.memory_bytes) == TRAITS
