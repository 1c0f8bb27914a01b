"""Every command and every snippet of README.md and docs/ runs, on a model that is small enough for it."""

import contextlib
import functools
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import autofit
from autofit import models
from autofit.cli import main
from autofit.core.layout import fitted_to
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.models import HuggingFaceModel
from autofit.training.on_devices import run_on_devices
from autofit.tuning import pipeline
from tests import tiny
from tests.models.diffusion.whole import write_whole

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
INSTALLS = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e "  # what CI itself runs
NAMED, FOLDER = "llama-3.1-8b", "./llama-3.1-8b"
LARGE = "llama-3.1-70b"  # for many devices, each of which takes part of a batch
PICTURES = "./sdxl"  # whose weights are said to be of the preset of that name
# bytes, and three of the tokenizer
SMALL = {
    **tiny.LLAMA,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "architectures": ["LlamaForCausalLM"],
}


AXOLOTL = """\
base_model: ./llama-3.1-8b
sequence_len: 16
micro_batch_size: 1
gradient_accumulation_steps: 4
adapter: lora
lora_r: 8
bf16: true
"""
SDXL = """\
pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"
resolution = 1024
network_module = "networks.lora"
network_dim = 8
network_train_unet_only = true
mixed_precision = "bf16"
sdpa = true
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@functools.cache
def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            Block(page, text[: m.start()].count("\n") + 1, m[1], m[2])
            for m in _FENCE.finditer(text)
        ]
    return [block for block in found if not languages or block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """What a block of commands runs of autofit and of Python, as lists of words."""
    for line in block.text.splitlines():
        if line.startswith(INSTALLS):
            line = line.split(" && ")[-1].removeprefix(".venv/bin/")
        words = shlex.split(line, comments=True)
        if words[:3] != ["python", "-m", "pytest"]:
            yield words


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} == {"sh", "python", "text"}


def test_the_models_named_are_known() -> None:
    known = {row["name"] for row in models.describe_presets()}
    named = {
        words[words.index("--model") + 1]
        for block in blocks("sh")
        for words in commands(block)
        if "--model" in words
    }
    assert named - {FOLDER} <= known
    assert NAMED in named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(
        r"\]\(([^)#:]*)(?:#([^)]*))?\)", _FENCE.sub("", page.read_text(encoding="utf-8"))
    )
    assert links or page.name != "README.md"
    for path, place in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        if place:
            headings = re.findall(
                r"^#+ (.*)$", _FENCE.sub("", target.read_text(encoding="utf-8")), re.MULTILINE
            )
            assert place in {
                re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
                for heading in headings
            }


# Commands


@pytest.fixture(scope="module")
def kept(executor: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages speak of: two runs, data, and a small model under a large one's name."""
    folder = tmp_path_factory.mktemp("reader")
    weights = folder / "llama-3.1-8b"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps(SMALL))
    workload = models.resolve(str(weights), sequence_length=16, effective_batch_size=4)
    assert isinstance(workload.model, HuggingFaceModel)
    workload.model().save_pretrained(weights)
    texts = [
        {"text": "Alice was beginning to get very tired of sitting by her sister on the bank."}
    ] * 24
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    (folder / "sdxl.toml").write_text(SDXL)
    write_whole(folder / "sdxl", "sdxl")
    photos = folder / "photos"
    photos.mkdir()
    Image.linear_gradient("L").convert("RGB").save(photos / "cat.png")
    (photos / "cat.txt").write_text("a cat")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, executor, weights)
        for name, precision in (("run", "fp32"), ("other-run", "bf16")):
            autofit.search(NAMED, gpu_mem=24, set={"precision": precision}, out=folder / name)
    return folder


def shrink(patch: pytest.MonkeyPatch, executor: Any, weights: Path) -> None:
    """Searches and predictions take a small model for a large one, and searches the CPU for the card.

    Of several devices there are two. Nothing is predicted before the one probe of each, nor followed after it, and
    every change of an estimate takes the same. The rest is as it is.
    """
    resolve, run_search = models.resolve, pipeline.run_search

    def small(name: str, **asked: Any) -> Workload:
        if name in models.model_names() and name not in models.preset_names():
            given = {"resolution": 64, "effective_batch_size": 2}
            return resolve(str(weights.parent / PICTURES), loss_options=None, **given)
        asked |= {"sequence_length": 16, "effective_batch_size": 64 if name == LARGE else 4}
        return resolve(
            str(weights) if name in (NAMED, LARGE, FOLDER, "tiny-llama") else name, **asked
        )

    def short(workload: Workload, options: SearchOptions, listener: Any = None) -> Any:
        space = options.space or ("qlora" if options.set else "exact")
        here = {
            "gpu_mem": None,
            "gpu": None,
            "device": "cpu",
            "mem": 1.0,
            "trials": 1,
            "space": space,
        }
        here |= {"executor": "local", "workers": None}  # what is measured is the same
        return run_search(workload, options.model_copy(update=here), listener)

    def two(session: Any, config: Any, *given: Any, devices: int, **options: Any) -> Any:
        knobs = fitted_to(config, 2, session.workload.effective_batch_size)
        return run_on_devices(session, knobs, *given, devices=2, **options)

    patch.setattr("autofit.api.fit.run_on_devices", two)
    for room in ("tuning.measured", "api.doctor"):
        patch.setattr(f"autofit.{room}.LocalExecutor", lambda *_: contextlib.nullcontext(executor))
    for room in ("api.search", "api.estimate", "api.tool_workload"):
        patch.setattr(importlib.import_module(f"autofit.{room}"), "resolve", small)
    plan_grpo = importlib.import_module("autofit.api.plan_grpo")
    patch.setattr(plan_grpo, "resolve", lambda _, **asked: resolve(str(weights), **asked))
    patch.setattr("autofit.api.fit.run_search", short)
    patch.setattr("autofit.api.search.search_or_predict", short)
    patch.setattr("autofit.tuning.measured.MeasuredSearch._predict", lambda *_: None)
    patch.setattr("autofit.tuning.annotations.Annotator.timelines", lambda *_: {})
    patch.setattr("autofit.tuning.annotations.Annotator.on_devices", lambda *_: ())
    what_if = importlib.import_module("autofit.api.what_if")
    patch.setattr(
        what_if,
        "predict_all",
        lambda _, __, configs, **options: ([1.0] * len(configs), [1.0] * len(configs)),
    )
    patch.setattr(what_if, "what_helps", lambda *_: ())


@pytest.fixture
def reader(kept: Path, tmp_path: Path, executor: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in a folder of his own with what the pages speak of."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shrink(monkeypatch, executor, tmp_path / "llama-3.1-8b")
    return tmp_path


def call(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Run one command; a search finds its run directory free unless it resumes."""
    if words[0] == "python" and words[1] != "-m":
        patch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
        return
    assert words[0] == "autofit", words
    if words[1] == "search" and "--out" in words and "--resume" not in words:
        shutil.rmtree(words[words.index("--out") + 1])
    with pytest.raises(SystemExit) as end:
        main(words[1:])
    assert end.value.code == 0, words


ran: set[frozenset[str]] = set()  # the commands of blocks that were run before


def once(blocks: list[Block]) -> list[Block]:
    """Without those that only say again what another one runs, with options in another order."""
    return list(
        {frozenset(map(frozenset, commands(block))): block for block in reversed(blocks)}.values()
    )[::-1]


# of peft, in train.py
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("block", once(blocks("sh")), ids=str)
def test_commands_run(block: Block, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands(block):
        if words[:2] == ["autofit", "train"] and frozenset(words) in ran:
            continue  # on the same run, which stands in every folder
        call(words, monkeypatch)
        ran.add(frozenset(words))
        for option in ("--out", "--output"):
            if option in words:
                assert (reader / words[words.index(option) + 1]).exists(), words


def inline() -> list[tuple[str, list[str]]]:
    """The commands within sentences, by page, but for those that a block runs with further options."""
    found = {}
    in_blocks = [set(command) for block in blocks("sh") for command in commands(block)]
    for page in PAGES:
        text = _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
        for quoted in re.findall(r"`([^`]+)`", text):
            # variables before a command
            words = [word for word in quoted.split() if "=" not in word.split("-")[0]]
            shown = any(set(words) <= command for command in in_blocks)
            if words[:2] == ["python", "-m"] or (
                words[:1] == ["autofit"] and words[1:] and not shown
            ):
                found[f"{page.name}: {quoted}"] = words
    return sorted(found.items())


INLINE = inline()


@pytest.mark.parametrize(("name", "words"), INLINE, ids=[name for name, _ in INLINE])
def test_commands_within_sentences_are_understood(
    name: str, words: list[str], reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] == "python":
        module = importlib.util.find_spec(words[2])
        assert module and module.origin, words
        package = Path(module.origin)
        sources = package.parent.glob("*.py") if package.name == "__init__.py" else [package]
        known = "".join(source.read_text() for source in sources)
        assert all(f'"{word}"' in known for word in words[3:] if word.startswith("--")), words
    elif len(words) == 2:
        with pytest.raises(SystemExit) as end:
            main([words[1], "--help"])
        assert end.value.code == 0
    else:
        call(words, monkeypatch)


# Snippets


class MyModel(torch.nn.Linear):
    """What a reader may have: numbers in, a number out."""

    def __init__(self) -> None:
        super().__init__(16, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def my_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(**batch).squeeze(1) - batch["y"]).square().mean()


def prelude(folder: Path) -> dict[str, Any]:
    """The names that snippets take for granted."""
    samples = [{"x": torch.ones(16), "y": torch.ones(())} for _ in range(128)]
    return {
        "torch": torch,
        "DataLoader": DataLoader,
        "autofit": autofit,
        "MyModel": MyModel,
        "my_loss": my_loss,
        "config": {"optimizer": "adamw"},
        "dataset": samples,
        "weights": str(folder / "llama-3.1-8b"),
        "data": [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8,
        "model": AutoModelForCausalLM.from_pretrained(folder / "llama-3.1-8b"),
        **dict.fromkeys(("loader", "held_out"), token_loader()),
    }


def token_loader() -> DataLoader:
    sample = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    return DataLoader([sample] * 8, batch_size=4)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.page == page for b in blocks("python"))],
    ids=lambda p: p.name,
)
def test_snippets_run_one_after_the_other(
    page: Path, reader: Path, request: pytest.FixtureRequest
) -> None:
    here = sys.modules[__name__]
    # as what a reader writes; to import this file takes a probe a second
    cloudpickle.register_pickle_by_value(here)
    request.addfinalizer(lambda: cloudpickle.unregister_pickle_by_value(here))
    for _ in range(2 if page.name == "README.md" else 1):  # searches are cached, training resumes
        names = prelude(reader)
        for block in blocks("python"):
            if block.page == page:
                exec(compile(block.text, str(block), "exec"), names)
        assert names["autofit"].__version__


# Samples


def lines_of(text: str) -> set[tuple[str, ...]]:
    return {tuple(line.split()) for line in text.splitlines()}


def test_the_cards_that_the_pages_list_are_what_is_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (shown,) = (block for block in blocks("text") if "--gpu " in block.text)
    lines = [tuple(line.split()) for line in shown.text.splitlines()]
    cards = [line for line in lines if line[2:3] and line[2] in ("yes", "no", "maybe")]
    assert len(cards) > 3
    what_if = importlib.import_module("autofit.api.what_if")
    monkeypatch.setattr(what_if, "card_names", lambda: [name for name, *_ in cards])
    command: Callable[..., Any] = main
    (asked,) = (w for b in blocks("sh") for w in commands(b) if "list" in w)
    with pytest.raises(SystemExit):
        command(asked[1:])
    said = lines_of(capsys.readouterr().out)
    for card in cards:
        assert card in said, card
