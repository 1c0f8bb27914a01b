"""A command in a script keeps all that is not changed, and is read without being run."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.export.importers import importer_of
from autofit.export.importers.command_line import CommandLine, command_text

PROGRAMS = (("swift", "sft"), ("swift", "rlhf"), ("trl", "sft"))
SCRIPT = """\
# 22 GB; swift sft is not run by a comment
export OMP_NUM_THREADS=1
count=2
pip install -q 'ms-swift>=4' && echo "it's there"

NPROC_PER_NODE=$count \\
CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model some/name \\
    --dataset 'one/data#500' \\
              'two/data#500' \\
    --learning_rate 1e-4 \\
    --gradient_accumulation_steps $(expr 16 / $count) \\
    --gradient_checkpointing_kwargs '{"use_reentrant": true, "every": 2}' \\
    --output_dir "$HOME/output" \\
    --seed ${SEED:-7} \\
    --bf16 > log.txt 2>&1

swift export --adapters output/last
"""


def command(text: str = SCRIPT) -> CommandLine:
    return CommandLine.of(text, "train.sh", PROGRAMS)


def test_what_a_script_says() -> None:
    found = command()
    assert found.program == ("swift", "sft")
    told = {key: value for key, value in found.keys.items() if not key.startswith("ENV.")}
    assert told == {
        "launcher.command": "swift sft",
        "model": "some/name",
        "dataset": ["one/data#500", "two/data#500"],
        "learning_rate": 1e-4,
        "gradient_accumulation_steps": 8,
        "gradient_checkpointing_kwargs.use_reentrant": True,
        "gradient_checkpointing_kwargs.every": 2,
        "output_dir": "$HOME/output",  # what only the machine knows
        "seed": 7,
        "bf16": True,
    }
    assert found.keys["ENV.NPROC_PER_NODE"] == 2


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("$(expr 32 / 4 / 2)", 4),
        ("$((8 * 2))", 16),
        ("`expr 9 - 2`", 7),
        ("$(expr 1 / 0)", "$(expr 1 / 0)"),
        ("$(nproc)", "$(nproc)"),
    ],
)
def test_sums_are_worked_out(written: str, value: object) -> None:
    assert command(f"swift sft --steps {written}\n").keys["steps"] == value


def test_a_variable_is_set_before_the_command() -> None:
    """Of TRL a file has it as `env`, which its command does not take."""
    text = "export A=1\nB=2 trl sft --model_name_or_path m \\\n  --dtype bfloat16\n"
    found = CommandLine.of(text, "train.sh", [("trl", "sft")])
    assert found.keys["ENV.A"] == 1

    changed = found.changed({"ENV.C": "x y", "dtype": "float32"})
    assert changed.splitlines()[1] == "B=2 C='x y' trl sft --model_name_or_path m \\"
    assert CommandLine.of(changed, "train.sh", [("trl", "sft")]).keys == {
        **found.keys,
        "ENV.C": "x y",
        "dtype": "float32",
    }

    importer = importer_of(found.keys, "train.sh")
    assert importer.name_of(found.keys, "env.A") == "ENV.A"
    assert importer.says(found.keys, "env.A") == "1"
    assert importer.name_of({"model_name_or_path": "m"}, "env.A") == "env.A"


def test_nothing_changed_is_the_same_text() -> None:
    assert command().changed({}) == SCRIPT


def test_only_what_is_changed_differs() -> None:
    values = {
        "gradient_accumulation_steps": 4,
        "bf16": False,
        "gradient_checkpointing_kwargs.use_reentrant": False,
        "attn_impl": "flash_attn",
    }
    text = command().changed(values)
    assert (
        text.replace(" 4 \\\n", " $(expr 16 / $count) \\\n")
        .replace('"use_reentrant": false', '"use_reentrant": true')
        .replace("--bf16 false \\\n    --attn_impl flash_attn", "--bf16")
        == SCRIPT
    )
    assert command(text).keys == {**command().keys, **values}


def test_ends_of_lines_stay_as_they_are() -> None:
    text = "swift sft \\\r\n  --model m \\\r\n  --seed 1\r\n"
    assert command(text).keys["seed"] == 1
    changed = command(text).changed({"seed": 2, "bf16": True})
    assert changed == ("swift sft \\\r\n  --model m \\\r\n  --seed 2 \\\r\n  --bf16 true\r\n")


def test_how_else_a_command_is_started() -> None:
    text = "accelerate launch --config_file fsdp.json swift/cli/sft.py --model m --lora-rank=4\n"
    found = command(text)
    assert found.keys["launcher.config_file"] == "fsdp.json"
    assert found.keys["launcher.program"] == "accelerate"
    assert found.keys["lora_rank"] == 4
    assert found.changed({"lora_rank": 8}) == text.replace("--lora-rank=4", "--lora_rank 8")
    assert command("python -m swift.cli.rlhf --rlhf_type dpo").program == ("swift", "rlhf")
    text = "accelerate launch --num_processes 2 -m trl.scripts.dpo --model_name_or_path m\n"
    found = CommandLine.of(text, "train.sh", [("trl", "dpo")])
    assert found.program == ("trl", "dpo")
    assert found.keys["launcher.num_processes"] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo nothing\n", "has no command that trains, such as swift sft"),
        ("swift sft --model a\nswift rlhf --model b\n", "has 2 commands that train"),
        ("swift sft config.yaml\n", "the options of swift sft are in config.yaml"),
    ],
)
def test_what_is_not_one_command_is_refused(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        command(text)


WORDS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), min_size=1, max_size=9)
PLAIN = WORDS.filter(lambda word: not word.startswith("-") and "$" not in word and "`" not in word)


@given(st.dictionaries(st.from_regex(r"[a-z_]{3,9}", fullmatch=True), PLAIN, min_size=1))
def test_the_words_of_a_command_come_back(options: dict[str, str]) -> None:
    """Whatever is in them, and a changed value is read back as it was given."""
    words = ["swift", "sft"]
    for name, value in options.items():
        words += [f"--{name}", value]
    text = command_text(words)
    assert shlex.split(text.replace("\\\n", " ")) == words

    first = next(iter(options))
    changed = command(text).changed({first: "another's $value"})
    assert shlex.split(changed.replace("\\\n", " ")) == [
        "another's $value" if words[index - 1] == f"--{first}" else word
        for index, word in enumerate(words)
    ]
