"""Images beside texts as training data, which the model's own processor makes batches of, one when it is taken.

What is written before training are the texts, by the processor's chat template, and which of their tokens are learnt:
those of the assistant's turns. How many tokens an image takes only the processor knows, so learnt tokens are counted
from the end of a text.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from autofit.core.errors import InputError, as_input_error, pluralize, sentence
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.batch import IGNORED_LABEL
from autofit.data.cached_map import cached_map
from autofit.data.columnar import Stored
from autofit.data.images import check_pillow, opened_image, read_image
from autofit.data.options import DataOptions
from autofit.data.processors import Processing
from autofit.data.rows import named_file, read_rows
from autofit.data.samples import FileLoader

_SHORTER = "Search with a longer sequence length, or give smaller images."
_MARK = "<image>"  # where in a text an image is, in LLaVA's data
_FEATURES = {
    "text": datasets.Value("string"),
    "learnt": datasets.List(datasets.Value("int32")),  # the ids of all spans, one after the other
    # Of each learnt span: its tokens, those behind it, the images before its end, and its end among the characters.
    "spans": datasets.List(datasets.List(datasets.Value("int32"))),
    "largest": datasets.Value("int32"),  # id of a token
    "tokens": datasets.Value("int32"),  # with one for each image, or as many as a template writes
}


@dataclass(frozen=True)
class SeenTexts:
    """Texts beside images; the processor is asked for a batch when it is taken."""

    written: Any  # rows of _FEATURES, in a cache file
    images: Sequence[Sequence[str | Stored]]
    locations: Sequence[str]
    processing: Processing
    length: int
    kept: Sequence[int]  # the rows that are samples

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        indices = [self.kept[sample] for sample in chosen.tolist()]
        rows = [self.written[index] for index in indices]
        inputs = self._processed([row["text"] for row in rows], indices)
        ids, counts = inputs["input_ids"], inputs["attention_mask"].sum(-1).tolist()
        labels = torch.full_like(ids, IGNORED_LABEL)
        for number, (row, index, count) in enumerate(zip(rows, indices, counts, strict=True)):
            learnt, last_image = torch.tensor(row["learnt"]), count
            for size, behind, images, end in row["spans"]:
                stop = count - behind
                if images < len(self.images[index]):  # how many tokens follow is not known
                    stop = self._processed([row["text"][:end]], [index], images)["input_ids"].shape[
                        1
                    ]
                span, learnt = learnt[:size], learnt[size:]
                self._check(ids[number, stop - size : stop], span, index)
                labels[number, stop - size : stop] = span
                if images == len(self.images[index]):
                    last_image = min(last_image, stop - size)
            # cutting would cut an image; told before training but for a few tokens
            if last_image >= self.length:
                message = f"{self.locations[index]} has {count} tokens, and none to learn behind all images among the"
                raise InputError(f"{message} first {self.length}.", _SHORTER)
        batch = {**inputs, "labels": labels}
        is_cut = [
            name for name, part in batch.items() if getattr(part, "shape", ())[:2] == ids.shape
        ]
        cut = {name: batch[name][:, : self.length] for name in is_cut}
        return {**batch, **cut}

    def largest_id(self) -> int:
        return int(max(self.written["largest"]))

    def _processed(
        self, texts: list[str], chosen: list[int], images: int | None = None
    ) -> dict[str, torch.Tensor]:
        """What the processor makes of texts and the first images of each."""
        opened = [
            [
                read_image(file, "RGB", where=f"{self.locations[index]}: ")
                for file in self.images[index][:images]
            ]
            for index in chosen
        ]
        with _blaming(", ".join(self.locations[index] for index in chosen), "does not take"):
            made = _made(self.processing.processor, texts, opened)
        wanted = self.processing.arguments | {"input_ids", "attention_mask"}
        return {name: part for name, part in made.items() if name in wanted}

    def _check(self, found: torch.Tensor, expected: torch.Tensor, index: int) -> None:
        if not torch.equal(found, expected):
            name = type(self.processing.processor).__name__
            message = f"{self.locations[index]}: {name} adds tokens to a text in a way that autofit does not know."
            raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")


def image_text_loader(
    workload: Workload, path: Path, processing: Processing, options: DataOptions
) -> FileLoader:
    """The loader of a file whose rows name images and have texts, for a model with that processor."""
    check_pillow(path)
    assert workload.sequence_length is not None, "models/ gives it one"
    rows = read_rows(path, TASKS[workload.task].rows)
    folder = path if path.is_dir() else path.parent
    columns = (rows.columns[name] for name in rows.form)
    samples = [
        _sample(dict(zip(rows.form, row, strict=True)), folder, location)
        for *row, location in zip(*columns, rows.locations, strict=True)
    ]
    images = [files for _, files, _ in samples]
    tokenizer = processing.processor.tokenizer
    tokenizer.padding_side = "right"  # labels are counted from there
    # The tokenizer writes it: some processors ask their video processor for more, which may not be there.
    tokenizer.chat_template = processing.processor.chat_template or tokenizer.chat_template
    if tokenizer.chat_template is None:
        message = "the model's processor has no chat template, which says how images and texts are put together."
        raise InputError(
            message,
            "Give weights that were tuned to instructions, or chat_template.jinja beside them.",
        )
    written = cached_map(
        {"chat": [chat for chat, _, _ in samples], "location": list(rows.locations)},
        lambda batch: _written(tokenizer, batch),
        features=_FEATURES,
        key=(tokenizer.chat_template, tokenizer),
        progress="Tokenising" if options.progress else None,
    )
    length, sizes = workload.sequence_length, [sizes for _, _, sizes in samples]
    added = _added_tokens(processing.processor, sizes, rows.locations, options)
    more = [sum(added[size] for size in each) for each in sizes]
    kept = [
        n
        for n, images in enumerate(sizes)
        if _first_answer(written[n], len(images)) + more[n] < length
    ]
    if not kept:
        message = (
            f"no sample of {path} has a label to learn behind its images within {length} tokens."
        )
        raise InputError(message, _SHORTER)
    notes, of_all = list(rows.notes), pluralize(len(sizes), "sample")
    if cut := sum(written[n]["tokens"] + more[n] > length for n in kept):
        notes.append(f"cut to {length} tokens: {cut} of {of_all}.")
    if dropped := len(sizes) - len(kept):
        notes.append(
            f"left out, without a label behind their images within {length} tokens: {dropped} of {of_all}."
        )
    measured, largest = (
        getattr(workload.batch, "image_tokens", math.inf),
        max(more[n] for n in kept),
    )
    if largest > 2 * measured:
        of_images = (
            f"the images of a sample take up to {largest} tokens, and those of a search {measured}"
        )
        notes.append(f"{of_images}: training needs more memory, and more time, than was measured.")
    seen = SeenTexts(written, images, rows.locations, processing, length, kept)
    return FileLoader(seen, workload.effective_batch_size, notes=tuple(notes), ahead=True)


def _first_answer(row: Mapping[str, Any], images: int) -> float:
    """Where the first span begins that is learnt and has all images before it; infinite where there is none."""
    starts = [
        row["tokens"] - behind - size
        for size, behind, before, _ in row["spans"]
        if before == images
    ]
    return min(starts, default=math.inf)


def _added_tokens(
    processor: Any, sizes: Any, locations: Sequence[str], options: DataOptions
) -> dict[Any, int]:
    """How many tokens an image of each size takes, but for those that a template writes: found with a blank one."""
    from PIL import Image

    first = {
        size: location for each, location in zip(sizes, locations, strict=True) for size in each
    }
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}]}], tokenize=False
    )

    def measured(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokens = []
        for width, height, location in zip(
            rows["width"], rows["height"], rows["location"], strict=True
        ):
            with _blaming(location, "does not take"):
                ids = _made(processor, [text], [[Image.new("RGB", (width, height))]])["input_ids"]
            tokens.append(ids.shape[1] - len(_encoded(processor.tokenizer, text)["input_ids"]))
        return {"tokens": tokens}

    found = cached_map(
        {
            "width": [width for width, _ in first],
            "height": [height for _, height in first],
            "location": list(first.values()),
        },
        measured,
        features={"tokens": datasets.Value("int32")},
        key=(text, processor.to_json_string(), processor.tokenizer),
        progress="Measuring images" if options.progress else None,
    )
    return dict(zip(first, found["tokens"], strict=True))


def _made(processor: Any, texts: list[str], images: list[list[Any]]) -> Any:
    """What a processor makes of texts and the images of each."""
    options = {"add_special_tokens": not _begins_with_bos(processor.tokenizer, texts[0])}
    return processor(text=texts, images=images, padding=True, return_tensors="pt", **options)


def _encoded(tokenizer: Any, text: str) -> Any:
    options = {"add_special_tokens": not _begins_with_bos(tokenizer, text)}
    return tokenizer(text, return_offsets_mapping=True, verbose=False, **options)


def _sample(
    row: Mapping[str, Any], folder: Path, location: str
) -> tuple[str, list[str | Stored], list[Any]]:
    """A row's messages, as JSON, its images' files, and their widths and heights."""
    given = row.get("image", [])
    named = list(given) if isinstance(given, list | tuple) else [given]
    if "prompt" in row or "text" in row:
        answer = row["completion"] if "prompt" in row else row["text"]
        asked = (
            [{"role": "user", "content": row["prompt"]}]
            if "prompt" in row
            else [{"role": "user", "content": ""}]
        )
        messages = [*asked, {"role": "assistant", "content": answer}]
    else:
        messages = json.loads(row["messages"] if "messages" in row else row["conversations"])
    marked = sum(_texts(message["content"]).count(_MARK) for message in messages) == len(named)
    messages = [
        {**each, "content": _parts(each["content"], location, marked=marked)} for each in messages
    ]
    parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
    named = named or [part.get("image") or part.get("path") for part in parts]
    if named and not parts:
        asker = next((each for each in messages if each["role"] == "user"), messages[0])
        asker["content"] = [*({"type": "image"} for _ in named), *asker["content"]]
    elif len(parts) != len(named):
        raise InputError(
            f"{location}: {len(parts)} places for {len(named)} images.",
            "Give one place for each image.",
        )
    if not named:
        raise InputError(f"{location} names no image.", "Every row needs one.")
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(
            f"{location} has no message of the assistant, which is what is learnt.", "Add one."
        )
    chat = [{**each, "content": [_plain(part) for part in each["content"]]} for each in messages]
    files = [named_file(name, folder, location, "image") for name in named]
    sizes = []
    for file in files:
        with opened_image(file, where=f"{location}: ") as image:
            sizes.append(image.size)
    return json.dumps(chat, ensure_ascii=False), files, sizes


def _texts(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _parts(content: Any, location: str, *, marked: bool) -> list[Any]:
    """A message's content as a list of texts and images."""
    if isinstance(content, str):
        texts = (
            [text.strip("\n") for text in content.split(_MARK)]
            if marked and _MARK in content
            else [content]
        )
        parts = [
            part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})
        ]
        return [part for part in parts[1:] if part.get("text") != ""]
    known = isinstance(content, list) and all(
        isinstance(part, Mapping)
        and (
            part.get("type") == "image"
            or (part.get("type") == "text" and isinstance(part.get("text"), str))
        )
        for part in content
    )
    if not known:
        message = (
            f"{location}: the content of a message must be text, or a list of texts and images."
        )
        raise InputError(
            message, 'For example [{"type": "image"}, {"type": "text", "text": "What is this?"}].'
        )
    return list(content)


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part without the name of its file, which the template would write nothing of."""
    return {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}


def _written(tokenizer: Any, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The texts of messages, and what of them is learnt."""
    columns: dict[str, list[Any]] = {name: [] for name in _FEATURES}
    for chat, location in zip(rows["chat"], rows["location"], strict=True):
        with _blaming(location, "cannot write"):
            text, spans = _text_of(tokenizer, json.loads(chat))
            encoded = _encoded(tokenizer, text)
        ids, offsets = (
            np.array(encoded["input_ids"]),
            np.array(encoded["offset_mapping"]).reshape(-1, 2),
        )
        # not of tokens that are added
        starts = np.where(offsets[:, 1] > offsets[:, 0], offsets[:, 0], -1)
        inside = [np.flatnonzero((starts >= start) & (starts < end)) for start, end, _ in spans]
        columns["text"].append(text)
        columns["tokens"].append(len(ids))
        columns["largest"].append(int(ids.max()))
        columns["learnt"].append([int(ids[token]) for tokens in inside for token in tokens])
        columns["spans"].append(
            [
                [len(tokens), len(ids) - int(tokens[-1]) - 1, images, end]
                for tokens, (_, end, images) in zip(inside, spans, strict=True)
                if len(tokens)
            ]
        )
    return columns


def _text_of(tokenizer: Any, chat: list[Any]) -> tuple[str, list[tuple[int, int, int]]]:
    """A chat in the template; and of each turn of the assistant its start and end among the characters, and
    the images before its end. Of a turn that a template writes otherwise once more follow, what stays is learnt."""

    def render(turns: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(chat[:turns], tokenize=False, **options))

    text, spans = render(len(chat)), []
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            asked = render(number, add_generation_prompt=True) if number else ""
            start, end = (_alike(text, each) for each in (asked, render(number + 1)))
            images = sum(
                part["type"] == "image" for each in chat[: number + 1] for part in each["content"]
            )
            spans.append((start, end, images))
    return text, spans


def _alike(text: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    different = (
        place for place, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]
    )
    return next(different, min(len(text), len(other)))


def _begins_with_bos(tokenizer: Any, text: str) -> bool:
    """Whether a template wrote the beginning of text, which a tokenizer would add again."""
    return tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)


def _blaming(location: str, what: str) -> Any:
    message = f"{location}: the model's processor {what} this: {{}}.".format
    return as_input_error(
        lambda error: message(sentence(error)), "Correct the data, or the processor's files."
    )
