"""Chats, and prompts with what completes them, as public data sets write them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from autofit.core.errors import InputError
from autofit.data.rows import COMPLETION, MESSAGES, TEXT, Rows, read_rows
from tests.data.letters import lines

CAUSAL = (TEXT, COMPLETION, MESSAGES)
ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
TURNS = [ASKED, SAID]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def rows(folder: Path, *given: Any) -> Rows:
    return read_rows(lines(folder, *given), CAUSAL)


def chats(found: Rows) -> list[Any]:
    assert found.form == MESSAGES
    assert len(found.columns["tools"]) == len(found.columns["messages"])
    return [json.loads(chat) for chat in found.columns["messages"]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS}, TURNS),
        ({"conversations": SHAREGPT}, TURNS),
        ({"conversations": TURNS}, TURNS),
        (
            {
                "conversations": [
                    {"from": "user", "value": "Hi"},
                    {"from": "assistant", "value": "Yes"},
                ]
            },
            TURNS,
        ),
        (
            {"id": "1", "system": "Be brief.", "conversations": SHAREGPT},
            [{"role": "system", "content": "Be brief."}, *TURNS],
        ),
        ({"system": "", "conversations": SHAREGPT}, TURNS),
        ({"prompt": [ASKED], "completion": [SAID]}, [{**ASKED, "weight": 0}, SAID]),
        ({"instruction": "Hi", "output": "Yes", "history": []}, TURNS),
        (
            {
                "instruction": "a",
                "input": "b",
                "output": "c",
                "history": [["Hi", "Yes"]],
                "system": "s",
            },
            [
                {"role": "system", "content": "s"},
                *TURNS,
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c"},
            ],
        ),
    ],
)
def test_chats(tmp_path: Path, row: Any, expected: Any) -> None:
    assert chats(rows(tmp_path, row, row)) == [expected, expected]


def test_what_a_turn_has_beside_is_kept(tmp_path: Path) -> None:
    turn = {"from": "gpt", "value": "Yes", "weight": 0}
    assert chats(rows(tmp_path, {"conversations": [SHAREGPT[0], turn]})) == [
        [ASKED, {**SAID, "weight": 0}]
    ]
    message = {**SAID, "weight": 1, "reasoning_content": "Hm.", "name": None}
    expected = {**SAID, "weight": 1, "reasoning_content": "Hm."}
    assert chats(rows(tmp_path, {"messages": [ASKED, message]})) == [[ASKED, expected]]


def test_rows_of_one_form_may_have_several_shapes(tmp_path: Path) -> None:
    assert chats(rows(tmp_path, {"messages": TURNS}, {"conversations": SHAREGPT})) == [TURNS, TURNS]


def test_alpaca_has_the_prompt_of_its_own_training(tmp_path: Path) -> None:
    with_input = {"instruction": "Add {them}.", "input": "1, 2", "output": "3"}
    found = rows(tmp_path, with_input, {"instruction": "Sing.", "input": "", "output": "La."})
    assert found.form == COMPLETION
    assert found.columns["prompt"] == [
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {them}.\n\n### Input:\n1, 2\n\n### Response:",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSing.\n\n### Response:",
    ]
    assert found.columns["completion"] == ["3", "La."]
    assert found.notes == (
        "rows of instructions are read with Alpaca's prompt; of each, what completes it is learnt.",
    )
    dolly = rows(tmp_path, {"instruction": "Add {them}.", "context": "1, 2", "response": "3"})
    assert dolly.columns["prompt"] == found.columns["prompt"][:1]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("prompt", "response"),
        ("query", "response"),
        ("question", "answer"),
        ("question", "response"),
        ("input", "output"),
    ],
)
def test_pairs_under_other_names(tmp_path: Path, prompt: str, completion: str) -> None:
    found = rows(tmp_path, {prompt: "a", completion: "b"})
    assert found.columns == {"prompt": ["a"], "completion": ["b"]}
    (note,) = found.notes
    assert note.startswith(f"{prompt} and {completion} are read as prompt and completion")


def test_the_more_specific_form_wins_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    pair = {"text": "all", "prompt": "a", "completion": "b", "id": 1}
    found = rows(tmp_path, pair)
    assert found.columns == {"prompt": ["a"], "completion": ["b"]}
    assert found.notes == ("read of each row: prompt, completion; left out: text.",)
    found = rows(tmp_path, {**pair, "messages": TURNS}, {"messages": TURNS, "question": "q"})
    assert found.form == MESSAGES
    assert found.notes == (
        "read of each row: messages; left out: text, prompt, completion, question.",
    )
    found = rows(tmp_path, {"text": "all", "question": "a", "answer": "b", "context": "c"})
    assert found.columns == {"text": ["all"]}
    found = rows(tmp_path, {"text": "all", "instruction": "a", "output": "b", "choices": ["c"]})
    assert found.columns == {"text": ["all"]}
    assert rows(tmp_path, {"text": "all", "prompt": "", "completion": None, "id": 1}).notes == ()


def test_tools_are_kept_for_the_template(tmp_path: Path) -> None:
    chat = {"messages": TURNS}
    found = rows(
        tmp_path,
        {**chat, "tools": TOOLS},
        {**chat, "tools": json.dumps(TOOLS)},
        chat,
        {**chat, "tools": " "},
    )
    assert [json.loads(tools) if tools else tools for tools in found.columns["tools"]] == [
        TOOLS,
        TOOLS,
        "",
        "",
    ]
    assert found.notes == ()


def test_what_a_data_set_fills_in_is_no_part_of_tools_and_their_calls(tmp_path: Path) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    def tool(**parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    given = [
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "tool_calls": [call(a=1), call(b="2")]},
            ],
            "tools": [tool(a="x"), tool(b="y")],
        }
    ]
    datasets.Dataset.from_list(given).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list(given).to_parquet(str(tmp_path / "a.parquet"))
    for path in (tmp_path / "saved", tmp_path / "a.parquet"):
        found = read_rows(path, CAUSAL)
        assert chats(found) == [given[0]["messages"]]
        assert json.loads(found.columns["tools"][0]) == given[0]["tools"]


def test_content_in_parts_is_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert chats(rows(tmp_path, {"messages": [{"role": "user", "content": parts}, SAID]})) == [
        TURNS
    ]


# What cannot be read


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": "Hi"}, "line 1: conversations must be a list of at least one turn"),
        ({"conversations": ["Hi"]}, "line 1: every turn must be an object, not str"),
        (
            {"conversations": [{"from": "function_call", "value": "f"}]},
            "a turn is from 'function_call', which is no",
        ),
        (
            {"conversations": [{"from": 1, "value": "f"}]},
            "a turn is from 1, which is no known role",
        ),
        ({"conversations": [{"from": "gpt"}]}, "the message of assistant has no content"),
        ({"conversations": [{"value": "a"}]}, "every message must be an object with a role"),
        (
            {"prompt": [ASKED], "completion": "Yes"},
            "completion must be a list of messages beside one that is, not str",
        ),
        (
            {"prompt": "Hi", "completion": [SAID]},
            "prompt must be a list of messages beside one that is, not str",
        ),
        ({"prompt": [], "completion": [SAID]}, "prompt must be a list of messages"),
        ({"instruction": "a", "output": "b", "history": "c"}, "history must be a list, not str"),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            "every turn of history must be a list of two texts",
        ),
        ({"instruction": 1, "output": "b"}, "instruction must be text, not int"),
        ({"instruction": "a", "output": 1}, "completion must be text, not int"),
        (
            {"question": "a", "answer": "b", "context": "c"},
            "line 1 has context beside question and answer",
        ),
        (
            {"prompt": "a", "response": "b", "system": "c"},
            "line 1 has system beside prompt and response",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            r"line 1 holds a preference \(chosen and rejected\)",
        ),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, ASKED]},
            "another message of the system",
        ),
        ({"messages": TURNS, "tools": "none"}, "tools is text that is not JSON"),
        ({"messages": TURNS, "tools": ["f"]}, "tools must be a list of objects"),
        (
            {"messages": [{"role": "user", "content": {"a": 1}}]},
            "the content of user must be text, not dict",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "the content of user has a part of type 'str', not text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
                ]
            },
            "the content of user has a part of type 'image_url', not text. Leave it out, or train a model that takes",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "a part of type text without text",
        ),
    ],
)
def test_rows_that_cannot_be_read(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        rows(tmp_path, row)


def test_a_history_that_only_later_rows_have_is_not_dropped(tmp_path: Path) -> None:
    row = {"instruction": "a", "output": "b"}
    with pytest.raises(
        InputError,
        match="line 2 has history beside instruction and output, which would not be read",
    ):
        rows(tmp_path, row, {**row, "history": [["c", "d"]]})


def test_a_later_row_lacks_what_the_first_has(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2 lacks conversations"):
        rows(tmp_path, {"conversations": SHAREGPT}, {"text": "a"})
    with pytest.raises(InputError, match="line 2 lacks answer"):
        rows(tmp_path, {"question": "a", "answer": "b"}, {"question": "a"})
