"""The assistant's turns in a chat template without generation marks, held against TRL's templates, which have them."""

import re
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.data.chat import ChatTemplate, UnlocatedError, marks_assistant_turns, unlearnt
from tests.data.templates import CHATML, MISTRAL, MISTRAL_V3, of_trl, tokenizer_for

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", **({} if content is None else {"content": content}), **more}


def call(**arguments: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "id": "abc456789",
        "function": {"name": "weather", "arguments": arguments},
    }


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": "abc456789", "content": content}


CONVERSATIONS: dict[str, Messages] = {
    "one": [user("hi"), assistant("hello")],
    "more": [user("hi"), assistant("hello"), user("and"), assistant("bye")],
    "a system": [
        {"role": "system", "content": "be nice"},
        user("hi"),
        assistant("hello"),
        user("a"),
        assistant("b"),
    ],
    "alike": [user("hi"), assistant("hi"), user("hi"), assistant("hi")],
    "roles": [
        user("user"),
        assistant("assistant"),
        user("assistant"),
        assistant("user\nassistant\n"),
    ],
    "blanks": [user("  hi \n"), assistant("\n hello  \n\n"), user("\n"), assistant("bye ")],
    "an empty answer": [user("hi"), assistant(""), user("x"), assistant("y")],
    "empty ones": [user(""), assistant("a"), user(""), assistant("")],
    "special": [
        user(
            "<|im_end|>\n<|im_start|>assistant\nno<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        assistant("a <|im_end|>\n<|im_start|>user\nno<|im_end|>"),
        user("<end_of_turn>\n<start_of_turn>model\n [/INST]"),
        assistant("<|eot_id|> yes<end_of_turn>\n</s>"),
    ],
    "thinking": [
        user("a"),
        assistant("<think>\nhm\n</think>\n\nold"),
        user("b"),
        assistant("<think>\nwell\n</think>\n\nnew"),
    ],
    "reasoning": [
        user("a"),
        assistant("old", reasoning_content="hm"),
        user("b"),
        assistant("new", thinking="well\n"),
    ],
    "a question at the end": [user("hi"), assistant("hello"), user("more")],
    "tools": [
        user("weather?"),
        assistant("I look.", tool_calls=[call(city="Oslo", days=3)]),
        result("cold"),
        assistant("It is cold."),
        user("thanks"),
        assistant("bye"),
    ],
    "two calls": [
        user("weather?"),
        assistant("", tool_calls=[call(city="Oslo"), call(n=1)]),
        result("cold"),
        result("warm"),
        assistant("So so."),
    ],
    "a call alone": [
        user("weather?"),
        assistant(None, tool_calls=[call(n=1)]),
        result("cold"),
        assistant(""),
    ],
}

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": {}},
    }
]
WITH_TOOLS = ("tools", "two calls", "a call alone")

# What TRL's marks hold beyond what the model writes: the end of the header, which the generation prompt writes.
HEADERS = {
    "deepseek_r1_distill": "<\uff5cAssistant\uff5c>",
    "deepseekv3": "<\uff5cAssistant\uff5c>",
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "qwen2_5": "<|im_start|>assistant\n",
    "qwen3_8": "<|im_start|>assistant\n<think>\n",
}

# Conversations that are refused: their turns have headers within them, other ends, or are several messages.
UNPROVEN: dict[str, tuple[str, ...]] = {
    "deepseek_r1_distill": ("tools", "two calls"),
    "diffusion_gemma": WITH_TOOLS,
    "gptoss": ("reasoning", *WITH_TOOLS),
    "muse_glimmer": ("reasoning", "two calls"),
}

# TRL's own templates write another text of these.
OTHERWISE = {
    "deepseek_r1_distill": ("thinking",),
    "qwen3": ("blanks",),
}

PAIRS = (
    *(
        "cohere",
        "cohere2",
        "deepseek_r1_distill",
        "deepseekv3",
        "diffusion_gemma",
        "gemma",
        "gemma3",
        "gptoss",
    ),
    *(
        "lfm2",
        "lfm2_v2",
        "llama3",
        "muse_glimmer",
        "nemotron_3_nano",
        "nemotron_3_ultra",
        "phi3",
        "phi3_5",
    ),
    *(
        "qwen2_5",
        "qwen2_5_vl",
        "qwen3",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_8",
        "qwen3_instruct_2507",
        "qwen3_vl",
    ),
)


@pytest.mark.parametrize("name", PAIRS)
def test_turns_are_where_trl_marks_them(name: str) -> None:
    own = ChatTemplate(tokenizer_for(of_trl(name)))
    marked = ChatTemplate(tokenizer_for(of_trl(f"{name}_training")))
    compared = 0
    for about, messages in CONVERSATIONS.items():
        tools = TOOLS if about in WITH_TOOLS else None
        try:
            own.render(messages, tools)
            text_of_trl, marks = marked.render_with_turns(messages, tools)
        except Exception:  # not every template takes tools, or a system message
            assert about in (*WITH_TOOLS, "a system")
            continue

        if about in UNPROVEN.get(name, ()):
            with pytest.raises(UnlocatedError):
                own.render_with_turns(messages, tools)
            continue
        text, turns = own.render_with_turns(messages, tools)
        if about in OTHERWISE.get(name, ()):
            continue
        assert learnt(text, turns) == learnt(
            text, truth(text, text_of_trl, marks, HEADERS.get(name, ""))
        ), about
        compared += 1
    assert compared >= 11


def learnt(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, str]]:
    return [(start, text[start:end]) for start, end in spans]


def truth(
    text: str, text_of_trl: str, marks: list[tuple[int, int]], header: str
) -> list[tuple[int, int]]:
    """TRL's marks in a model's own rendering, which leaves out old reasoning where TRL's keeps it."""
    spans: list[tuple[int, int]] = []
    place, done = 0, 0
    for start, end in marks:
        assert text.startswith(text_of_trl[done:start], place)
        place += start - done
        turn = text_of_trl[start:end]
        if not text.startswith(turn, place):
            turn = re.sub(r"^<think>\n.*?\n</think>\n\n", "", turn, count=1, flags=re.DOTALL)
        assert text.startswith(turn, place)
        done = end

        begin = place
        if header:
            head = text.rfind(header, 0, place + len(header))
            begin = max(place, head + len(header))
        place += len(turn)
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], place)  # marked in two parts
        else:
            spans.append((begin, place))
    assert text[place:] == text_of_trl[done:]
    return spans


def test_turns_of_chatml() -> None:
    template = ChatTemplate(tokenizer_for(CHATML))
    assert turns(template, "blanks") == ["\n hello  \n\n<|im_end|>\n", "bye <|im_end|>\n"]
    assert turns(template, "an empty answer") == ["<|im_end|>\n", "y<|im_end|>\n"]
    assert (
        turns(template, "special")[0] == "a <|im_end|>\n<|im_start|>user\nno<|im_end|><|im_end|>\n"
    )


def turns(template: ChatTemplate, about: str) -> list[str]:
    text, spans = template.render_with_turns(
        CONVERSATIONS[about], TOOLS if about in WITH_TOOLS else None
    )
    return [text[start:end] for start, end in spans]


def test_turns_of_mistral_which_has_no_generation_prompt() -> None:
    template = ChatTemplate(tokenizer_for(MISTRAL))
    assert turns(template, "more") == ["hello</s>", "bye</s>"]
    assert turns(template, "blanks") == ["\n hello  \n\n</s>", "bye </s>"]
    assert turns(template, "empty ones") == ["a</s>", "</s>"]
    assert turns(template, "special")[1] == "<|eot_id|> yes<end_of_turn>\n</s></s>"


def test_turns_of_mistral_that_calls_tools() -> None:
    template = ChatTemplate(tokenizer_for(MISTRAL_V3))
    assert turns(template, "a system") == [" hello</s>", " b</s>"]
    calls = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}, "id": "abc456789"}]</s>'
    assert turns(template, "tools") == [calls, " It is cold.</s>", " bye</s>"]
    assert turns(template, "a call alone")[1] == " </s>"


def test_the_last_turn_ends_as_the_template_ends_it() -> None:
    assert turns(ChatTemplate(tokenizer_for(of_trl("phi3"))), "more") == [
        "hello<|end|>\n",
        "bye<|end|>\n</s>",
    ]
    assert turns(ChatTemplate(tokenizer_for(of_trl("gptoss"))), "more") == [
        "<|channel|>final<|message|>hello<|end|>",
        "<|channel|>final<|message|>bye<|return|>",
    ]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages }}", "does not write each"),
        ("{{ messages[0].content }}", "does not write each"),
        (
            "{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}",
            "does not write each",
        ),
        ("{{ raise_exception('no') }}", "does not write each"),
        (
            "{% if messages | length == 4 %}{{ messages | map(attribute='content') | join }}{% endif %}",
            "does not write",
        ),
        (
            CHATML.replace("'<|im_end|>'", "('.' if loop.last else ',')"),
            "closes a turn in another way",
        ),
    ],
)
def test_a_template_that_shows_no_turns_is_refused(template: str, why: str) -> None:
    with pytest.raises(UnlocatedError, match=why):
        ChatTemplate(tokenizer_for(template)).end_of_turn()


def test_a_template_that_looks_at_contents_is_refused_where_that_matters() -> None:
    looks = CHATML.replace(
        "message['content'] +", "(message['content'] | length ~ message['content']) +"
    )
    template = ChatTemplate(tokenizer_for(looks))
    with pytest.raises(UnlocatedError, match="writes something else"):
        turns(template, "one")


def test_characters_of_the_marks_are_refused() -> None:
    with pytest.raises(UnlocatedError, match="private use"):
        ChatTemplate(tokenizer_for(CHATML)).render_with_turns([user("\U00100000"), assistant("a")])


def test_what_closes_a_turn() -> None:
    assert ChatTemplate(tokenizer_for(CHATML)).end_of_turn() == "<|im_end|>\n"
    assert ChatTemplate(tokenizer_for(of_trl("glm4moe"))).end_of_turn() == ""


def test_tools_reach_the_template_or_do_not() -> None:
    messages = CONVERSATIONS["tools"]
    assert ChatTemplate(tokenizer_for(of_trl("qwen3"))).shows_tools(messages, TOOLS)
    assert not ChatTemplate(tokenizer_for(CHATML)).shows_tools(messages, TOOLS)
    text, _ = ChatTemplate(tokenizer_for(of_trl("qwen3"))).render_with_turns(messages, TOOLS)
    assert '"description": "of a city"' in text


# Turns that are not learnt


@pytest.mark.parametrize("name", ["llama3", "llama3_training"])
def test_a_turn_is_left_out(name: str) -> None:
    tokenizer = tokenizer_for(of_trl(name))
    assert marks_assistant_turns(tokenizer) is name.endswith("training")
    text, spans = ChatTemplate(tokenizer).render_with_turns(CONVERSATIONS["more"], without={1})
    assert [text[start:end] for start, end in spans] == ["bye<|eot_id|>"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, set()),
        ({"weight": 1}, set()),
        ({"weight": 0}, {1}),
        ({"weight": 0.0}, {1}),
        ({"train": False}, {1}),
        ({"training": True}, set()),
        ({"weight": None}, set()),
    ],
)
def test_which_messages_are_not_to_be_learnt(keys: dict[str, Any], expected: set[int]) -> None:
    assert (
        unlearnt(
            [{**user("a"), "weight": 1, "train": False}, assistant("b", **keys)], "a.jsonl, line 1"
        )
        == expected
    )


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            assistant("b", weight=0.5),
            "line 1: a message has the weight 0.5, and only 0 and 1 can be followed",
        ),
        (assistant("b", train="no"), "a message has the train 'no'"),
        ({**user("b"), "train": True}, "a message of user is to be learnt, as its train says"),
    ],
)
def test_what_cannot_be_learnt_as_a_message_says(message: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        unlearnt([message], "a.jsonl, line 1")
