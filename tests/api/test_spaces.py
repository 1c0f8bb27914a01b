"""The number of configs of every space that ships, for the case it is told of."""

import json

from autofit import techniques
from autofit.api.spaces import TRAITS, describe_spaces, reference_case
from autofit.core.hardware import GIB
from autofit.search.space import list_spaces, load_space
from autofit.setup import Stage
from autofit.training.inspect import inspect_workload
from autofit.tuning.space import knob_choices


def test_every_space_is_told_of_with_its_size() -> None:
    data = describe_spaces()
    assert json.loads(json.dumps(data)) == data
    rows = {row["name"]: row for row in data["spaces"]}
    assert list(rows) == [space.name for space in list_spaces()]
    assert {"exact", "full", "lora", "qlora", "everything"} == set(rows)
    assert all(row["configs"] > 0 for row in rows.values())
    assert rows["everything"]["configs"] > 50_000
    assert {row["counted"] for row in rows.values()} == {"exactly"}
    assert rows["exact"]["configs"] < rows["full"]["configs"] < rows["everything"]["configs"]
    assert "llama-3.1-8b" in data["counted_for"]


def test_the_case_is_the_one_it_says() -> None:
    workload, hardware = reference_case()
    assert 23 * GIB < hardware.memory_bytes <= 24 * GIB
    assert workload.effective_batch_size == 32
    assert inspect_workload(workload, hardware, hardware.memory_bytes) == TRAITS


def test_they_hold_no_degenerate_values() -> None:
    workload, hardware = reference_case()
    spaces = {
        each.name: load_space(each.name, knob_choices(workload, hardware)).knobs
        for each in list_spaces()
    }
    for knobs in spaces.values():
        assert all("adamw" in str(optimizer) for optimizer in knobs["optimizer"])
        assert all(rank == 0 or rank >= 8 for rank in knobs["lora_rank"])
        assert knobs.get("lora_targets", ("all-linear",)) == ("all-linear",)
    assert spaces["exact"]["precision"] == ("fp32",)
    assert spaces["full"]["lora_rank"] == (0,)
    assert 0 not in spaces["lora"]["lora_rank"]
    assert "none" not in spaces["qlora"]["quantization"]
    assert "quantization" not in spaces["lora"]


def test_exact_holds_exact_values_only() -> None:
    workload, hardware = reference_case()
    for knob, values in load_space("exact", knob_choices(workload, hardware)).knobs.items():
        technique = techniques.technique_named(knob)
        assert all(technique.exact(value, workload) for value in values), knob


def test_every_value_of_every_knob_is_in_everything_unless_it_is_degenerate() -> None:
    """Nothing that a practitioner would reach for is missing from the search."""
    workload, hardware = reference_case()
    knobs = load_space("everything", knob_choices(workload, hardware)).knobs
    for technique in techniques.all_techniques():
        if technique.stage is Stage.SHARD:  # null on one device
            continue
        if technique.choices_for(workload, hardware) == (technique.off,):  # set, never searched
            continue
        missing = set(technique.values) - set(knobs.get(technique.name, ()))
        degenerate = {"sgd", "adafactor", "lion-8bit", "muon", "attention", "all-linear+head"}
        # Beside adapters there is nothing to page, and else optimizer_offload keeps 32 bits on the host.
        # Tuned kernels are no faster by what is predicted, and take minutes to compile.
        unsearched = {"paged-adamw", "max-autotune-no-cudagraphs"}
        assert missing <= {*degenerate, *unsearched}, technique.name
