"""Images beside texts as training data. The model's own processor makes a batch when it is taken.

Before training, the texts are written by the processor's chat template, and it is noted which of
their tokens are learnt: those of the assistant's turns. How many tokens an image takes only the
processor knows, so learnt tokens are counted from the end of a text.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from autofit.core.errors import InputError
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.cached_map import Columns, cached_map
from autofit.data.chat_marks import shared_length
from autofit.data.columnar import MediaFile
from autofit.data.failures import failing_as
from autofit.data.images import check_pillow, opened_image, read_image
from autofit.data.options import IGNORED_LABEL, DataOptions
from autofit.data.processors import Processing
from autofit.data.row_source import Row
from autofit.data.rows import Rows, named_file, read_rows
from autofit.data.samples import Batch, FileLoader, share_note

_SHORTER = "Search with a longer sequence length, or give smaller images."
_MARK = "<image>"  # where in a text an image is, in LLaVA's data
_IMAGE = {"type": "image"}
_FEATURES = {
    "text": datasets.Value("string"),
    "learnt": datasets.List(datasets.Value("int32")),  # the ids of all spans, one after the other
    # Of each learnt span: its tokens, the tokens behind it, the images before its end, and where it
    # ends among the characters.
    "spans": datasets.List(datasets.List(datasets.Value("int32"))),
    "largest": datasets.Value("int32"),  # id of a token
    "tokens": datasets.Value("int32"),  # with one for each image, or as many as a template writes
}
Size = tuple[int, int]  # of an image: width and height in pixels


@dataclass(frozen=True)
class SeenTexts:
    """Texts beside images; the processor is asked for a batch when it is taken.

    Attributes:
        written: rows of _FEATURES, in a cache file.
        images: of each row.
        length: in tokens, that batches are cut to.
        kept: the rows that are samples.
    """

    written: Any
    images: Sequence[Sequence[MediaFile]]
    locations: Sequence[str]
    processing: Processing
    length: int
    kept: Sequence[int]

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, chosen: torch.Tensor) -> Batch:
        indices = [self.kept[sample] for sample in chosen.tolist()]
        rows = [self.written[index] for index in indices]
        texts = [row["text"] for row in rows]
        inputs = self._processed(texts, indices)

        ids = inputs["input_ids"]
        labels = torch.full_like(ids, IGNORED_LABEL)
        counts = inputs["attention_mask"].sum(-1).tolist()
        for number, index in enumerate(indices):
            self._label(labels[number], ids[number], rows[number], index, counts[number])

        batch = {**inputs, "labels": labels}
        for name, part in batch.items():
            is_per_token = getattr(part, "shape", ())[:2] == ids.shape
            if is_per_token:
                batch[name] = part[:, : self.length]

        return batch

    def _label(
        self,
        labels: torch.Tensor,
        ids: torch.Tensor,
        row: Row,
        index: int,
        count: int,
    ) -> None:
        """Write the learnt tokens of a row into its labels, [tokens].

        Args:
            count: of the row's tokens without padding.
        """
        learnt = torch.tensor(row["learnt"])
        total_images = len(self.images[index])
        first_answer = count  # behind all images
        for size, behind, images, end in row["spans"]:
            stop = count - behind
            if images < total_images:
                # How many tokens the later images take is not known, so the text up to here is
                # processed by itself.
                begun = self._processed([row["text"][:end]], [index], images)
                stop = begun["input_ids"].shape[1]

            start = stop - size
            self._check(ids[start:stop], learnt[:size], index)
            labels[start:stop] = learnt[:size]
            learnt = learnt[size:]
            if images == total_images:
                first_answer = min(first_answer, start)

        # Cutting would cut an image. Before training, that was known but for a few tokens.
        if first_answer >= self.length:
            message = (
                f"{self.locations[index]} has {count} tokens, and none to learn behind all images "
                f"among the first {self.length}."
            )
            raise InputError(message, _SHORTER)

    def largest_id(self) -> int:
        return int(max(self.written["largest"]))

    def _processed(self, texts: list[str], chosen: list[int], images: int | None = None) -> Batch:
        """What the processor makes of texts and the first `images` of each; None: of all images."""
        opened = []
        locations = []
        for index in chosen:
            location = self.locations[index]
            locations.append(location)

            files = self.images[index][:images]
            pictures = [read_image(file, "RGB", where=f"{location}: ") for file in files]
            opened.append(pictures)

        with _blaming(", ".join(locations), "does not take"):
            made = _made(self.processing.processor, texts, opened)

        wanted = {*self.processing.arguments, "input_ids", "attention_mask"}
        return {name: part for name, part in made.items() if name in wanted}

    def _check(self, found: torch.Tensor, expected: torch.Tensor, index: int) -> None:
        """Raise InputError unless the processor wrote the tokens that are to be learnt."""
        if not torch.equal(found, expected):
            name = type(self.processing.processor).__name__
            message = (
                f"{self.locations[index]}: {name} adds tokens to a text in a way that autofit "
                "does not know."
            )
            raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")


@dataclass(frozen=True)
class _Sample:
    """A row that is checked.

    Attributes:
        chat: its messages, as JSON.
        sizes: of its images.
    """

    chat: str
    images: list[MediaFile]
    sizes: list[Size]


def image_text_loader(
    workload: Workload,
    path: Path,
    processing: Processing,
    options: DataOptions,
) -> FileLoader:
    """The loader of a file whose rows name images and have texts, for that processor."""
    check_pillow(path)
    length = workload.sequence_length
    assert length is not None, "models/ gives it one"
    rows = read_rows(path, TASKS[workload.task].rows)
    samples = list(_samples(rows, path if path.is_dir() else path.parent))

    tokenizer = _chat_tokenizer(processing.processor)
    written = cached_map(
        {"chat": [sample.chat for sample in samples], "location": list(rows.locations)},
        lambda batch: _written(tokenizer, batch),
        features=_FEATURES,
        key=(tokenizer.chat_template, tokenizer),
        progress="Tokenising" if options.progress else None,
    )

    added = _added_tokens(processing.processor, samples, rows.locations, options)
    kept = []
    cut = 0
    largest = 0
    for number, sample in enumerate(samples):
        row = written[number]
        more = sum(added[size] for size in sample.sizes)
        if _first_answer(row, len(sample.images)) + more >= length:
            continue
        kept.append(number)
        cut += row["tokens"] + more > length
        largest = max(largest, more)

    if not kept:
        message = (
            f"no sample of {path} has a label to learn behind its images within {length} tokens."
        )
        raise InputError(message, _SHORTER)

    notes = list(rows.notes)
    if cut:
        notes.append(share_note(f"cut to {length} tokens", cut, len(samples)))
    if len(kept) < len(samples):
        what = f"left out, without a label behind their images within {length} tokens"
        notes.append(
            share_note(
                what,
                len(samples) - len(kept),
                len(samples),
            )
        )

    measured = getattr(workload.batch, "image_tokens", math.inf)
    if largest > 2 * measured:
        notes.append(
            f"the images of a sample take up to {largest} tokens, and those of a search {measured}: "
            "training needs more memory, and more time, than was measured."
        )

    images = [sample.images for sample in samples]
    seen = SeenTexts(written, images, rows.locations, processing, length, kept)
    return FileLoader(seen, workload.effective_batch_size, notes=tuple(notes), ahead=True)


def _chat_tokenizer(processor: Any) -> Any:
    """The processor's tokenizer, set up to write chats as the processor would."""
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "right"  # labels are counted from there
    # The tokenizer writes chats: some processors ask their video processor for more, which may not
    # be there.
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    if tokenizer.chat_template is None:
        message = (
            "the model's processor has no chat template, which says how images and texts "
            "are put together."
        )
        remedy = "Give weights that were tuned to instructions, or chat_template.jinja beside them."
        raise InputError(message, remedy)

    return tokenizer


def _first_answer(row: Row, images: int) -> float:
    """The first learnt token behind all images; infinite where there is none."""
    first = math.inf
    for size, behind, before, _ in row["spans"]:
        if before == images:
            first = min(first, row["tokens"] - behind - size)

    return first


def _added_tokens(
    processor: Any,
    samples: Sequence[_Sample],
    locations: Sequence[str],
    options: DataOptions,
) -> dict[Size, int]:
    """How many tokens an image of each size adds to those that a template writes for it.

    It is measured with a blank image of each size.
    """
    from PIL import Image

    first: dict[Size, str] = {}  # where an image of each size is named last
    for sample, location in zip(samples, locations, strict=True):
        first.update(dict.fromkeys(sample.sizes, location))

    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template(
        [
            {
                "role": "user",
                "content": [_IMAGE],
            }
        ],
        tokenize=False,
    )

    def measured(rows: Columns) -> Columns:
        tokens = []
        for width, height, location in zip(
            rows["width"],
            rows["height"],
            rows["location"],
            strict=True,
        ):
            blank = Image.new("RGB", (width, height))
            with _blaming(location, "does not take"):
                ids = _made(processor, [text], [[blank]])["input_ids"]
            tokens.append(ids.shape[1] - len(_encoded(tokenizer, text)["input_ids"]))

        return {"tokens": tokens}

    found = cached_map(
        {
            "width": [width for width, _ in first],
            "height": [height for _, height in first],
            "location": list(first.values()),
        },
        measured,
        features={"tokens": datasets.Value("int32")},
        key=(text, processor.to_json_string(), tokenizer),
        progress="Measuring images" if options.progress else None,
    )

    return dict(zip(first, found["tokens"], strict=True))


def _made(processor: Any, texts: list[str], images: list[list[Any]]) -> Any:
    """What a processor makes of texts and the images of each."""
    adds_special = _adds_special_tokens(processor.tokenizer, texts[0])
    return processor(
        text=texts,
        images=images,
        padding=True,
        return_tensors="pt",
        add_special_tokens=adds_special,
    )


def _encoded(tokenizer: Any, text: str) -> Any:
    """The tokens of a text, and where each stands among the characters."""
    adds_special = _adds_special_tokens(tokenizer, text)
    return tokenizer(
        text,
        return_offsets_mapping=True,
        verbose=False,
        add_special_tokens=adds_special,
    )


def _adds_special_tokens(tokenizer: Any, text: str) -> bool:
    """Whether a tokenizer adds its special tokens: not where a template wrote the first of them."""
    return tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def _samples(rows: Rows, folder: Path) -> Iterator[_Sample]:
    """The checked rows of a file in a folder."""
    for number, location in enumerate(rows.locations):
        row = {name: rows.columns[name][number] for name in rows.form}
        yield _sample(row, folder, location)


def _sample(row: Row, folder: Path, location: str) -> _Sample:
    """A row with its images found, and with a place in its messages for each of them."""
    named = row.get("image", [])
    if not isinstance(named, list | tuple):
        named = [named]

    messages = _messages(row)
    named = _with_places(messages, list(named), location)
    if not named:
        raise InputError(f"{location} names no image.", "Every row needs one.")
    if not any(message["role"] == "assistant" for message in messages):
        problem = f"{location} has no message of the assistant, which is what is learnt."
        raise InputError(problem, "Add one.")

    # The names of files are left out, of which a template would write nothing.
    for message in messages:
        message["content"] = [_plain(part) for part in message["content"]]

    files = [named_file(name, folder, location, "image") for name in named]
    sizes = []
    for file in files:
        with opened_image(file, where=f"{location}: ") as image:
            sizes.append(image.size)

    return _Sample(json.dumps(messages, ensure_ascii=False), files, sizes)


def _with_places(messages: list[Any], named: list[Any], location: str) -> list[Any]:
    """Make the content of each message a list of texts and images, with a place for each image.

    Args:
        messages: whose contents are replaced.
        named: the images of the row; empty where the messages name them.

    Returns:
        The images.
    """
    marks = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            marks += content.count(_MARK)

    places: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts = _parts(content, location, is_marked=marks == len(named))
        message["content"] = parts
        places += filter(_is_image, parts)

    if not named:
        return [part.get("image") or part.get("path") for part in places]

    if not places:
        asker = messages[0]
        for message in reversed(messages):
            if message["role"] == "user":
                asker = message
        asker["content"] = [_IMAGE] * len(named) + asker["content"]
    elif len(places) != len(named):
        problem = f"{location}: {len(places)} places for {len(named)} images."
        raise InputError(problem, "Give one place for each image.")

    return named


def _messages(row: Row) -> list[Any]:
    """A row's chat, or its text as the answer to its prompt."""
    if "prompt" in row:
        question = row["prompt"]
        answer = row["completion"]
    elif "text" in row:
        question = ""
        answer = row["text"]
    else:
        name = "messages" if "messages" in row else "conversations"
        return list(json.loads(row[name]))

    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _parts(content: Any, location: str, *, is_marked: bool) -> list[Any]:
    """A message's content as a list of texts and images.

    Args:
        is_marked: marks in texts stand for the images.
    """
    if isinstance(content, str):
        texts = [content]
        if is_marked and _MARK in content:
            texts = [text.strip("\n") for text in content.split(_MARK)]

        parts: list[Any] = []
        for number, text in enumerate(texts):
            if number:
                parts.append(_IMAGE)
            if text:
                parts.append({"type": "text", "text": text})

        return parts

    if not isinstance(content, list) or not all(
        _is_text(part) or _is_image(part) for part in content
    ):
        message = (
            f"{location}: the content of a message must be text, or a list of texts and images."
        )
        example = 'For example [{"type": "image"}, {"type": "text", "text": "What is this?"}].'
        raise InputError(message, example)

    return list(content)


def _is_image(part: Any) -> bool:
    """Whether a part of a message's content stands for an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_text(part: Any) -> bool:
    """Whether a part of a message's content is a text."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def _plain(part: Row) -> dict[str, Any]:
    """A part with nothing but what a template writes."""
    if _is_image(part):
        return dict(_IMAGE)
    return {"type": "text", "text": part["text"]}


def _written(tokenizer: Any, rows: Columns) -> Columns:
    """The texts of messages, and what of them is learnt: columns of _FEATURES."""
    columns: Columns = {name: [] for name in _FEATURES}
    for chat, location in zip(rows["chat"], rows["location"], strict=True):
        with _blaming(location, "cannot write"):
            text, turns = _text_of(tokenizer, json.loads(chat))
            encoded = _encoded(tokenizer, text)

        ids = np.array(encoded["input_ids"])
        offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
        begins = offsets[:, 0]
        # Tokens that were added have no characters, and are in no turn.
        starts = np.where(offsets[:, 1] > begins, begins, -1)

        learnt: list[int] = []
        spans = []
        for start, end, images in turns:
            is_inside = (starts >= start) & (starts < end)
            tokens = np.flatnonzero(is_inside)
            if not len(tokens):
                continue

            learnt += ids[tokens].tolist()
            last = int(tokens[-1])
            spans.append(
                [
                    len(tokens),
                    len(ids) - last - 1,
                    images,
                    end,
                ]
            )

        columns["text"].append(text)
        columns["learnt"].append(learnt)
        columns["spans"].append(spans)
        columns["largest"].append(int(ids.max()))
        columns["tokens"].append(len(ids))

    return columns


def _text_of(tokenizer: Any, chat: list[Any]) -> tuple[str, list[tuple[int, int, int]]]:
    """A chat in the template, and the assistant's turns in it.

    Of each turn: its start and end among the characters, and the images before its end. Where a
    template writes a turn otherwise once more turns follow, what stays the same is learnt.
    """

    def render(turns: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(chat[:turns], tokenize=False, **options))

    text = render(len(chat))
    spans = []
    images = 0
    for number, message in enumerate(chat):
        images += len(list(filter(_is_image, message["content"])))
        if message["role"] != "assistant":
            continue

        asked = ""
        if number:
            asked = render(number, add_generation_prompt=True)
        start = shared_length(text, asked)
        end = shared_length(text, render(number + 1))
        spans.append((start, end, images))

    return text, spans


def _blaming(location: str, what: str) -> AbstractContextManager[None]:
    """Raises InputError for whatever a processor raises inside."""
    problem = f"{location}: the model's processor {what} this"
    return failing_as(problem, "Correct the data, or the processor's files.")
