"""Rows of images and texts become batches of the model's own processor; the assistant's turns are learnt, no more."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers.models.smolvlm import processing_smolvlm

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.batch import split
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions
from autofit.data.processors import Processing, load_processor
from autofit.data.samples import FileLoader
from autofit.models.tasks.image_text import RandomImageText
from tests.data import pictures
from tests.data.letters import lines

ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "pixel_values",
    "image_grid_thw",
    "mm_token_type_ids",
    "labels",
)
ARGUMENTS += ("token_type_ids", "pixel_attention_mask")
ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
TURNS = [ASKED, {"role": "assistant", "content": "red"}]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processor")
    pictures.save_qwen(folder)
    return load_processor(folder, "qwen2_5_vl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures.draw(tmp_path / "a.png", "red")
    pictures.draw(tmp_path / "wide.png", "blue", (120, 60))
    return tmp_path


def loader(processor: Any, path: Path, length: int = 128, measured: int = 64) -> FileLoader:
    synthetic = RandomImageText(length, 300, (), (), 261, measured, (), (4, 4704))
    workload = Workload(
        model=torch.nn.Identity,
        batch=synthetic,
        task="image-text-to-text",
        sequence_length=length,
        effective_batch_size=4,
    )
    return file_loader(
        workload,
        path,
        tokenizer=None,
        options=DataOptions(),
        processing=Processing(processor, frozenset(ARGUMENTS)),
    )


def whole(processor: Any, folder: Path, *rows: Any, **given: Any) -> dict[str, torch.Tensor]:
    """All rows as one batch, in the order of the file."""
    samples = loader(processor, lines(folder, *rows), **given).samples
    return samples.batch(torch.arange(len(samples)))


def learnt(processor: Any, batch: dict[str, torch.Tensor], row: int = 0) -> str:
    labels = batch["labels"][row]
    assert torch.equal(labels[labels != -100], batch["input_ids"][row][labels != -100])
    return str(processor.tokenizer.decode(labels[labels != -100]))


def written(processor: Any, batch: dict[str, torch.Tensor], row: int = 0) -> str:
    return str(
        processor.tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row].bool()])
    )


@pytest.mark.parametrize(
    "row",
    [
        {"image": "a.png", "prompt": "what?", "completion": "red"},
        {"images": ["a.png"], "prompt": "what?", "completion": "red"},
        {"images": ["a.png"], "messages": TURNS},
        {"image": "a.png", "messages": [{"role": "user", "content": "what?"}, TURNS[1]]},
        {
            "id": 7,
            "image": "a.png",
            "conversations": [
                {"from": "human", "value": "<image>\nwhat?"},
                {"from": "gpt", "value": "red"},
            ],
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "a.png"},
                        {"type": "text", "text": "what?"},
                    ],
                },
                TURNS[1],
            ]
        },
    ],
)
def test_the_forms_that_people_have(processor: Any, folder: Path, row: Any) -> None:
    batch = whole(processor, folder, row)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    asked = f"<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\n"
    assert written(processor, batch) == f"{asked}red<|im_end|>\n"
    assert learnt(processor, batch) == "red<|im_end|>\n"
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]


@pytest.mark.parametrize(
    ("kind", "save", "end", "arguments"),
    [
        ("gemma3", pictures.save_gemma, "<end_of_turn>\n", {"token_type_ids", "pixel_values"}),
        pytest.param(
            *(
                "smolvlm",
                pictures.save_smol,
                "<end_of_utterance>\n",
                {"pixel_attention_mask", "pixel_values"},
            ),
            marks=pictures.needs_smol,
        ),
    ],
)
def test_other_processors(
    folder: Path,
    kind: str,
    save: Any,
    end: str,
    arguments: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # a package that only its videos need
    save(folder)
    made = load_processor(folder, kind)
    one, two = (
        {"images": ["a.png"], "messages": TURNS},
        {"images": ["a.png", "wide.png"], "messages": [*TURNS, *TURNS]},
    )
    batch = whole(made, folder, one, two, length=192)
    assert arguments < set(batch) <= arguments | set(ARGUMENTS)
    assert [learnt(made, batch, row).replace(" ", "") for row in (0, 1)] == [
        f"red{end}",
        f"red{end}red{end}",
    ]
    assert [learnt(made, part).replace(" ", "") for part in split(batch, 1)] == [
        f"red{end}",
        f"red{end}red{end}",
    ]


def test_the_name_that_fast_image_processors_had(folder: Path) -> None:
    pictures.save_qwen(folder)
    settings = (folder / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").write_text(
        settings.replace('ImageProcessor"', 'ImageProcessorFast"')
    )
    made = load_processor(folder, "qwen2_5_vl")
    assert learnt(made, whole(made, folder, {"image": "a.png", "text": "red"})) == "red<|im_end|>\n"


def test_a_saved_data_set_of_images(processor: Any, folder: Path) -> None:
    files = [str(folder / "a.png"), str(folder / "wide.png")]
    one = datasets.Dataset.from_dict({"image": files, "n": [1, 2], "text": ["red", "blue"]})
    one.cast_column("image", datasets.Image()).save_to_disk(str(folder / "one"))
    samples = loader(processor, folder / "one").samples
    batch = samples.batch(torch.arange(2))
    assert [learnt(processor, batch, row) for row in (0, 1)] == [
        "red<|im_end|>\n",
        "blue<|im_end|>\n",
    ]
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"images": datasets.List(datasets.Image()), "messages": [turn]})
    rows = [
        {"images": files[::step], "messages": [{"role": "user", "content": "a"}, TURNS[1]]}
        for step in (-1, 1)
    ]
    several = datasets.Dataset.from_list(rows, features=features).select([1])
    several.save_to_disk(str(folder / "several"))
    batch = loader(processor, folder / "several").samples.batch(torch.arange(1))
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]


def test_captions(processor: Any, folder: Path) -> None:
    batch = whole(processor, folder, {"file_name": "a.png", "text": "a disc"})
    assert learnt(processor, batch) == "a disc<|im_end|>\n"


def test_every_turn_of_the_assistant_is_learnt_also_before_images(
    processor: Any, folder: Path
) -> None:
    turns = [*TURNS, ASKED, {"role": "assistant", "content": "blue"}]
    batch = whole(processor, folder, {"images": ["a.png", "wide.png"], "messages": turns})
    assert learnt(processor, batch) == "red<|im_end|>\nblue<|im_end|>\n"
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]


def test_samples_of_different_lengths_and_images_are_split(processor: Any, folder: Path) -> None:
    one = {"images": ["a.png"], "messages": TURNS}
    two = {
        "images": ["wide.png", "a.png"],
        "messages": [{"role": "user", "content": "which?"}, TURNS[1]],
    }
    batch = whole(processor, folder, one, two, one)
    parts = list(split(batch, 1))
    assert [part["image_grid_thw"].tolist() for part in parts] == [
        [[1, 2, 2]],
        [[1, 2, 4], [1, 2, 2]],
        [[1, 2, 2]],
    ]
    assert [len(part["pixel_values"]) for part in parts] == [4, 12, 4]
    assert [learnt(processor, part) for part in parts] == ["red<|im_end|>\n"] * 3


def test_what_the_forward_does_not_take_is_left_out(processor: Any, folder: Path) -> None:
    samples = loader(processor, lines(folder, {"image": "a.png", "text": "a"})).samples
    kept = type(samples)(
        **{**vars(samples), "processing": Processing(processor, frozenset({"pixel_values"}))}
    )
    assert set(kept.batch(torch.tensor([0]))) == {
        "input_ids",
        "attention_mask",
        "pixel_values",
        "labels",
    }


def test_answers_are_cut_to_the_length(processor: Any, folder: Path) -> None:
    row = {"image": "a.png", "prompt": "what?", "completion": "red" * 50}
    batch = whole(processor, folder, row, length=60)
    assert {name: tensor.shape[1] for name, tensor in batch.items() if "pixel" not in name} == {
        **dict.fromkeys(("input_ids", "attention_mask", "mm_token_type_ids", "labels"), 60),
        "image_grid_thw": 3,
    }
    assert learnt(processor, batch).startswith("redred")


def test_samples_that_cannot_be_cut_are_left_out(processor: Any, folder: Path) -> None:
    one = {"image": "a.png", "messages": TURNS}  # 32 tokens, of which the last 5 are learnt
    two = {"images": ["a.png", "wide.png"], "messages": [*TURNS, *TURNS]}
    found = loader(processor, lines(folder, one, two, one), length=60)
    assert found.notes == (
        "left out, without a label behind their images within 60 tokens: 1 of 3 samples.",
    )
    batch = found.samples.batch(torch.arange(2))
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    cut = loader(processor, lines(folder, one, one), length=28)
    assert cut.notes == ("cut to 28 tokens: 2 of 2 samples.",)
    assert learnt(processor, cut.samples.batch(torch.arange(1))) == "r"
    with pytest.raises(
        InputError, match=r"no sample of .* has a label to learn behind its images within 27 tokens"
    ):
        loader(processor, lines(folder, one), length=27)


def test_a_large_image_counts_with_its_tokens(processor: Any, folder: Path) -> None:
    pictures.draw(folder / "large.png", "red", (200, 200))  # 4 tokens, not 1
    rows = [
        {"image": name, "prompt": "what?", "completion": "red"} for name in ("a.png", "large.png")
    ]
    note = "the images of a sample take up to 3 tokens, and those of a search 1: training needs more memory"
    assert loader(processor, lines(folder, *rows), measured=1).notes[0].startswith(note)
    assert loader(processor, lines(folder, *rows), measured=2).notes == ()
    found = loader(processor, lines(folder, *rows), length=30)
    assert len(found.samples) == 1
    assert found.samples.batch(torch.arange(1))["image_grid_thw"].tolist() == [[1, 2, 2]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "line 2 lacks image or images or file_name"),
        ({"image": "b.png", "text": "a"}, r"line 2: the image .*b\.png is not there"),
        (
            {"image": "a.jsonl", "text": "a"},
            r"line 2: the image .*a\.jsonl cannot be read: UnidentifiedImageError",
        ),
        (
            {"image": "https://a.b/c.png", "text": "a"},
            "line 2: the image must be named by its file, not 'https",
        ),
        ({"image": [], "text": "a"}, "line 2 names no image"),
        ({"image": "a.png", "text": 1}, "line 2: text must be text, not int"),
    ],
)
def test_wrong_rows(processor: Any, folder: Path, row: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        whole(processor, folder, {"image": "a.png", "text": "a"}, row)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASKED, TURNS[0], TURNS[1]], "line 1: 2 places for 1 images"),
        ([ASKED], "line 1 has no message of the assistant"),
        (
            [{"role": "user", "content": [{"type": "video"}]}, TURNS[1]],
            "must be text, or a list of texts and images",
        ),
        ([ASKED, {"role": "assistant", "tool_calls": [{"name": "a"}]}], "must be text, or a list"),
        ([], "messages must be a list of at least one message"),
    ],
)
def test_wrong_messages(processor: Any, folder: Path, messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        whole(processor, folder, {"image": "a.png", "messages": messages})


def test_an_image_that_breaks_off_is_told_with_its_line(processor: Any, folder: Path) -> None:
    (folder / "half.png").write_bytes((folder / "a.png").read_bytes()[:100])
    with pytest.raises(InputError, match=r"line 1: the image .*half\.png cannot be read"):
        whole(processor, folder, {"image": "half.png", "text": "a"})


def test_a_processor_without_a_chat_template(folder: Path) -> None:
    pictures.save_qwen(folder)
    bare = load_processor(folder, "qwen2_5_vl")
    bare.chat_template = bare.tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        whole(bare, folder, {"image": "a.png", "text": "a"})
