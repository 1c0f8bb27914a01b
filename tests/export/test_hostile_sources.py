"""Hostile text in every leaf of what is exported: of each file that a tool gets, and of train.py, nothing but strings
and comments is other than with plain words."""

import dataclasses
import functools
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.export.script import train_script
from autofit.export.source import ExportSource
from autofit.export.tool import Tool, write
from autofit.export.tools import all_tools, tool_named
from tests.export.sources import CASES, MEASURED, OFF, SIZES, source
from tests.hostile import EVERYTHING, TEXTS, parsed, replaced, strings

# Of one that is a path, what PurePosixPath leaves as it is.
PATHS = TEXTS.filter(lambda text: not text.endswith("/") and "//" not in text and "/." not in text)
FIXED = {"config", "off", "task", "form"}
OF_THEIR_OWN = ("torchtitan", "torchtune")  # tools that refuse weights that they do not know


@functools.cache
def leaves() -> ExportSource:
    """A source with something in every field; what is text is one word each."""
    others = {
        "model": "word-model",
        "hardware": {
            "device": "cuda",
            "name": "word-name",
            "measured_on": "word-card",
            "allocator": "word-allocator",
        },
        "versions": {"autofit": "word-0", "word-package": "word-1", "transformers": "5.23.0"},
        "data": "word-data",
        "form": "messages",
        "packing": True,
        "weights": "word-weights",
        "targets": ("word-target", "word-other"),
        "heads": ("word-head",),
        "outputs": ("word-output",),
        "experts": ("word-expert",),
        "adapted_experts": ("word-adapted",),
    }
    return source(others=others)


def with_words(tool: Tool, case: dict[str, Any], text: str, task: str) -> ExportSource:
    """That source with the text behind every word, and a knob of one's own called so."""
    words = functools.partial(_hostile, text=text)
    fields = {
        field.name: getattr(leaves(), field.name) for field in dataclasses.fields(ExportSource)
    }
    changed = {
        name: value if name in FIXED else replaced(value, words) for name, value in fields.items()
    }
    config = Config({**OFF, **SIZES, **case, words("word-knob"): words("word-value")})
    data = f"{changed['data']}.jsonl"  # which tells tools what reads it
    changed |= {"weights": "meta-llama/Llama-3.1-8B"} if tool.name in OF_THEIR_OWN else {}
    return ExportSource(**{**changed, "config": config, "task": task, "data": data})


def _hostile(word: str, text: str) -> str:
    return f"{word}{text}" if word.startswith("word-") else word


@functools.cache
def plain(name: str, case: str, task: str) -> dict[str, Any] | None:
    """The files of a tool where all words are plain; None where it refuses."""
    tool = tool_named(name)
    try:
        files = write(tool, with_words(tool, CASES[case], "", task), file="word-file").files
    except InputError:
        return None
    return {name: parsed(_kind(tool, name), text) for name, text in files.items()}


def _kind(tool: Tool, name: str) -> str:
    """The name by whose ending a file is read: the first one's was given."""
    return (tool.file or f"{tool.name}.yaml") if name.startswith("word-") else name


@settings(max_examples=14, deadline=None)
@given(text=PATHS, case=st.sampled_from(sorted(CASES)), file=TEXTS, which=st.integers(0, 3))
@example(text=EVERYTHING, case="qlora", file=EVERYTHING, which=0)
@example(text=EVERYTHING, case="fsdp", file=EVERYTHING, which=1)
@example(text=EVERYTHING, case="compiled", file=EVERYTHING, which=2)
def test_of_every_tools_files_only_strings_change(
    text: str, case: str, file: str, which: int
) -> None:
    words = functools.partial(_hostile, text=text)
    file = _hostile("word-file", file.replace("/", "").replace("\0", ""))
    for tool in all_tools():
        tasks = tool.tasks or ("word-task",)
        task = tasks[which % len(tasks)]
        expected = plain(tool.name, case, task)
        if expected is None:
            continue
        made = write(tool, with_words(tool, CASES[case], text, words(task)), file=file).files
        assert list(made) == [file if name == "word-file" else name for name in expected]
        for (name, written), known in zip(made.items(), expected.values(), strict=True):
            read = parsed(_kind(tool, name), written)
            assert read == replaced(
                known, functools.partial(_behind_words, text=text, file=file)
            ), name
            assert "word-" not in "".join(strings(known)) or "word-" in "".join(strings(read))


WORD = re.compile(
    "word-(?:file|model|weights|data|target|other|head|output|expert|adapted|knob|value|task)"
)


def _behind_words(told: str, text: str, file: str) -> str:
    """What a string of the plain file becomes: the text stands behind each word, and the file has its own name."""
    return WORD.sub(lambda word: file if word[0] == "word-file" else f"{word[0]}{text}", told)


def script(text: str, case: dict[str, Any], predicted: bool) -> str:
    """A train.py with the text behind every word that it takes."""
    word = functools.partial(_hostile, text=text)
    model_config = {
        "model_type": "word-llama",
        "vocab_size": 9,
        "word-deep": {"word-key": ["word-value", 1, None]},
    }
    given = {
        "model": "word-model",
        "source": {"kind": "hub", "model": "word-model"},
        "model_config": {
            **model_config,
            "pad_token": "word-pad",
            "id2label": {"0": "word-label", "1": "word-class"},
        },
        "measured": None if predicted else MEASURED,
        "predicted": {"tokens_per_second": 10.0} if predicted else None,
        "versions": {
            "autofit": "word-0",
            "word-package": "word-1",
            "torch": "word-2",
            "transformers": "word-3",
        },
        "hardware": {**leaves().hardware, "device": "cuda"},
        "changes": ("word-change",),
    }
    workload = {
        "task": "causal-lm",
        "data": "word-data",
        "sequence_length": 16,
        "effective_batch_size": 8,
    }
    written = train_script(
        **replaced(given, word), workload=replaced(workload, word), config=Config({**OFF, **case})
    )
    assert written is not None
    return written


@settings(max_examples=14, deadline=None)
@given(text=TEXTS, predicted=st.booleans(), lora=st.booleans())
@example(text=EVERYTHING, predicted=False, lora=True)
@example(text=EVERYTHING, predicted=True, lora=False)
def test_of_train_py_only_strings_change(text: str, predicted: bool, lora: bool) -> None:
    case = {
        **SIZES,
        **({"lora_rank": 8, "lora_targets": f"word-target{text}".replace("+", "")} if lora else {}),
    }
    plain_case = {**case, "lora_targets": "word-target"} if lora else case
    known, read = (
        parsed("train.py", script(*each, predicted)) for each in (("", plain_case), (text, case))
    )

    def behind(told: str) -> str:
        if told == "word-target":
            return str(case["lora_targets"])
        return f"{told}{text}" if told.startswith("word-") else told

    assert read == replaced(known, behind)


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "lightning"])
def test_a_line_separator_in_a_versions_name_starts_no_line(name: str) -> None:
    evil = source(others={"versions": {"triton\u2028import os\u2028x: y\u2028#": "1"}})
    (text,) = write(tool_named(name), evil).files.values()
    assert not [line for line in text.splitlines() if line.startswith(("import os", "x: y"))]
