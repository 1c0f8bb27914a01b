"""A result.yaml that a hand changed is read or refused in a sentence, whatever reads it and whatever was changed."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.api import train as training
from autofit.api.estimate import config_of, workload_of
from autofit.api.training_arguments import training_arguments
from autofit.core.config import Config
from autofit.core.errors import AutofitError, InputError
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.export.from_result import export
from autofit.export.tools import describe_tools
from autofit.hardware.catalogue import card, hardware_of
from tests.mutations import mutations

CARD = hardware_of(card("rtx-4090"))
TOOLS = [tool["name"] for tool in describe_tools()]
KNOBS = {
    "precision": "bf16",
    "quantization": "none",
    "lora_rank": 8,
    "lora_targets": "all-linear",
    "attention": "sdpa",
    "gradient_accumulation_steps": 1,
    "micro_batch_size": 4,
    "optimizer": "adamw",
    "compile": "none",
}
MEASURED = {
    "tokens_per_second": 2203.4,
    "samples_per_second": 34.4,
    "step_seconds": {"median": 0.1, "low": 0.1, "high": 0.2},
    "peak_gib": {"allocated": 0.07, "reserved": 0.1, "device": None},
    "verified": True,
}
WHOLE: dict[str, Any] = {
    "autofit": 1,
    "model": "tiny-llama",
    "workload": {"task": "causal-lm", "sequence_length": 64, "effective_batch_size": 4},
    "source": {"kind": "preset", "model": "tiny-llama"},
    "hardware": {
        "device": "cpu",
        "name": "a CPU",
        "memory_gib": 23.5,
        "budget_gib": 2.0,
        "margin": 0.05,
    },
    "versions": {
        "autofit": "0.1.0",
        "torch": "2.13.0+cpu",
        "transformers": "5.23.0",
        "peft": "0.21.2",
    },
    "config": KNOBS,
    "measured": MEASURED,
    "tiers": {"full": None, "lora": {"config": KNOBS, "measured": MEASURED}, "qlora": None},
}
PREDICTED = {
    "allocated_bytes": 10**8,
    "device_bytes": {"low": 10**8, "high": 2 * 10**8},
    "step_seconds": 0.1,
    "tokens_per_second": 2.0,
}
ELSEWHERE = {
    "name": "a card",
    "allocator": "expandable_segments:False",
    "measured_on": "another card",
}
FOR_A_CARD = {
    **WHOLE,
    "hardware": {**WHOLE["hardware"], **ELSEWHERE},
    "measured": None,
    "predicted": PREDICTED,
    "config": {**KNOBS, "lora_rank": 0, "lora_targets": None},
}
RESULTS = {"measured": WHOLE, "predicted": FOR_A_CARD}


class ReachedError(AutofitError):
    """The training would begin."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "result.yaml"


@pytest.fixture(scope="module", autouse=True)
def _trains_nothing() -> Any:
    def fit(model: Any, loader: Any, *, config: Any, device: Any, **others: Any) -> None:
        assert isinstance(config, Config)
        assert isinstance(device, str)
        raise ReachedError("it trains")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "fit", fit)
        yield


@functools.cache
def workload() -> Workload:
    return workload_of("tiny-llama", CARD, seq_len=64, effective_batch=4)


def read(file: Path, reader: str) -> None:
    if reader == "train":
        data = file.with_name("data.txt")
        data.write_text("some text " * 100)
        training.train(file, data)
    elif reader == "training_arguments":
        training_arguments(file, output_dir=file.parent)
    elif reader == "estimate":
        config_of(file, {}, workload(), CARD)
    else:
        export(file, to=reader)


@pytest.mark.parametrize("reader", ["train", "training_arguments", "estimate", TOOLS[0]])
@pytest.mark.parametrize("kind", RESULTS)
def test_what_nobody_changed_is_read(file: Path, kind: str, reader: str) -> None:
    file.write_text(yaml.safe_dump(RESULTS[kind]))
    try:
        read(file, reader)
    except ReachedError:
        assert reader == "train"


@settings(max_examples=100)
@given(
    changed=st.sampled_from(list(RESULTS)).flatmap(lambda kind: mutations(RESULTS[kind])),
    data=st.data(),
)
def test_what_was_changed_is_read_or_refused(file: Path, changed: Any, data: st.DataObject) -> None:
    file.write_text(yaml.safe_dump(changed))
    reader = data.draw(st.sampled_from(["train", "training_arguments", "estimate", *TOOLS]))
    try:
        read(file, reader)
    except AutofitError as error:
        assert error.message


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("hardware", 3, "hardware must be a mapping"),
        ("hardware", {"memory_gib": "x"}, r"hardware\.memory_gib is 'x'"),
        ("hardware", {"device": 2}, r"hardware\.device is 2"),
        ("config", [1], "config must be a mapping"),
        ("measured", "yes", "measured must be a mapping"),
        ("versions", {"torch": 2.1}, r"versions\.torch is 2\.1"),
        ("workload", [], "workload must be a mapping"),
        ("workload", {"sequence_length": "64"}, r"workload\.sequence_length is '64'"),
        ("model", 7, "model is 7"),
        (
            "predicted",
            {"device_bytes": {"low": 10**400, "high": 1}},
            r"predicted\.device_bytes\.low is 1000",
        ),
    ],
)
def test_what_is_wrong_is_named(file: Path, part: str, value: Any, said: str) -> None:
    file.write_text(yaml.safe_dump({**WHOLE, part: value}))
    with pytest.raises(InputError, match=said):
        SavedResult.load(file)


@pytest.mark.parametrize(
    "value", ["x" * 3000, ["x"] * 1000, {"x" * 3000: 1}], ids=["text", "list", "mapping"]
)
@pytest.mark.parametrize("part", WHOLE)
def test_what_is_wrong_is_told_in_few_words_however_long_it_is(
    file: Path, part: str, value: Any
) -> None:
    whole = WHOLE[part] if isinstance(WHOLE[part], dict) else {}
    for changed in (value, *({**whole, name: value} for name in whole)):
        file.write_text(json.dumps({**WHOLE, part: changed}))  # which is YAML too
        try:
            read(file, "axolotl")
        except AutofitError as error:
            assert len(str(error)) < 2000


@pytest.mark.parametrize("part", ["hardware", "versions", "measured", "tiers", "source"])
@pytest.mark.parametrize("value", [None, "left out"])
def test_parts_that_no_reader_needs_may_be_missing(
    file: Path, part: str, value: str | None
) -> None:
    left = {name: each for name, each in WHOLE.items() if name != part}
    file.write_text(yaml.safe_dump(left if value else {**WHOLE, part: None}))
    read(file, "axolotl" if part != "source" else "estimate")
    if part != "source":
        with pytest.raises(ReachedError):
            read(file, "train")
