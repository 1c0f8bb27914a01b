"""Output layers that tools put in the place of a model's own: what they compute, train and hold."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.models import with_loss_of, workload_from_source
from autofit.models.heads import read_two_words
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup.layers import output_heads
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.models.tasks.test_preferences_about_images import LLAVA, QWEN
from tests.tiny import CPU

LORA: dict[str, Any] = {"lora_rank": 8, "precision": "bf16-mixed"}
BY_WORDS: dict[str, Any] = {"task": "generative-rerank", "texts": 3}
BY_VALUES: dict[str, Any] = {"task": "reward", "head": "values"}
CLASSES: dict[str, Any] = {
    "task": "sequence-classification",
    "sees": True,
    "options": {"num_labels": 7},
}
RANKED: dict[str, Any] = {"task": "rerank", "sees": True, "texts": 2}
REWARDED: dict[str, Any] = {"task": "reward", "sees": True}


def model_of(task: str, config: dict[str, Any] = QWEN, **fields: Any) -> HuggingFaceModel:
    if fields.get("sees"):
        source = {"kind": "directory", "path": "x"}
        return HuggingFaceModel("seeing", task, config, source, **fields)
    wide = tiny.llama(hidden_size=64, vocab_size=128)
    return replace(wide, task=task, **fields)


def workload_of(samples: int = 4, loss: Any = None, **fields: Any) -> Workload:
    model = model_of(**fields)
    made = huggingface_workload(
        model, sequence_length=32, effective_batch_size=samples, loss_options=loss
    )
    if fields["task"] == "embed":
        made = with_loss_of(made, "msswift")
    return replace(made, traits=None)


EMBEDDED: dict[str, Any] = {"task": "embed", "texts": 3, "head": "passing"}
OF_TEXTS = [
    EMBEDDED,
    BY_WORDS,
    {"task": "generative-rerank"},
    {"task": "rerank", "texts": 3},
    BY_VALUES,
]
OF_IMAGES = [{**EMBEDDED, "sees": True}, CLASSES, RANKED, REWARDED, {**REWARDED, "head": "values"}]


ADAPTERS: dict[str, Any] = {**LORA, "activation_checkpointing": "full", "micro_batch_size": 2}


# Each head once beside all weights or beside adapters, in turn; one of texts and one of images beside both.
@pytest.mark.parametrize(
    ("fields", "knobs"),
    [
        *zip(OF_TEXTS, itertools.cycle([{}, ADAPTERS]), strict=False),
        *zip(OF_IMAGES, itertools.cycle([ADAPTERS, {}]), strict=False),
        (BY_VALUES, ADAPTERS),
        (CLASSES, ADAPTERS),
    ],
    ids=str,
)
def test_a_trace_takes_what_a_step_takes(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    pictures = {"config": LLAVA} if fields.get("sees") else {}
    made = workload_of(**{**fields, **pictures})
    assert peak(traced(made, **knobs)) == tracked(made, knobs)


@pytest.mark.parametrize("fields", [*OF_TEXTS[1:], CLASSES, RANKED], ids=str)
def test_micro_batches_train_what_the_whole_does(fields: dict[str, Any]) -> None:
    losses = []
    for micro in (4, 1):
        made = workload_of(**fields)
        knobs = {"micro_batch_size": micro, "precision": "fp32"}
        setup = build(made, knobs, CPU)
        for module in setup.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        losses.append([train_step(setup, made.batch(4)).item() for _ in range(2)])
        setup.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize("fields", [EMBEDDED, BY_VALUES], ids=str)
def test_heads_are_divided_with_the_weights(fields: dict[str, Any]) -> None:
    knobs = {"data_parallel": "fsdp", "precision": "bf16-mixed"}
    several = AMPERE.of_several(2)
    divided = peak(traced(workload_of(**fields), several, **knobs))
    assert divided < peak(traced(workload_of(**fields), AMPERE, precision="bf16-mixed"))


def test_two_words_are_read_of_the_head() -> None:
    torch.manual_seed(0)
    model: Any = model_of("causal-lm")()
    ids = torch.randint(128, (2, 8))
    logits = model(ids).logits
    read_two_words(model)
    assert torch.allclose(model(ids).logits.squeeze(-1), logits[..., 0] - logits[..., 1], atol=1e-5)


def test_words_take_no_logits_of_the_vocabulary() -> None:
    model = tiny.llama(hidden_size=32, vocab_size=1024)
    bytes_of = {}
    for task in ("causal-lm", "generative-rerank"):
        made = huggingface_workload(
            replace(model, task=task), sequence_length=64, effective_batch_size=8
        )
        bytes_of[task] = peak(traced(replace(made, traits=None)))
    logits = 4 * 8 * 64 * 1024
    assert bytes_of["generative-rerank"] + logits < bytes_of["causal-lm"]


@pytest.mark.parametrize("kind", ["pointwise", "listwise"])
def test_the_scores_are_those_of_each_texts_end(kind: str) -> None:
    torch.manual_seed(0)
    made = workload_of(**BY_WORDS, loss={"kind": kind})
    model: Any = made.model()
    batch = made.batch(2)
    scores = model(batch["input_ids"].flatten(0, 1)).logits[:, -1, 0].view(2, 3)
    expected = functional.binary_cross_entropy_with_logits(scores, batch["labels"])
    if kind == "listwise":
        expected = -scores.log_softmax(dim=1)[:, 0].mean()
    assert made.loss is not None
    assert made.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_listwise_loss_takes_several_passages() -> None:
    made = workload_of(task="generative-rerank", loss={"kind": "listwise"})
    assert made.loss is not None
    with pytest.raises(InputError, match="several passages for each query"):
        made.loss(made.model(), made.batch(2))


def test_a_value_head_scores_beside_logits_that_nobody_reads() -> None:
    torch.manual_seed(0)
    model: Any = model_of(**BY_VALUES)().eval()
    ids = torch.randint(128, (2, 8))
    body = model.model(ids).last_hidden_state
    assert torch.allclose(model(input_ids=ids).logits, model.score(body).squeeze(-1), atol=1e-6)
    assert output_heads(model) == [model.score]


def test_a_value_head_holds_all_logits_in_16_and_in_32_bits() -> None:
    knobs = {**LORA, "activation_checkpointing": "full"}
    bytes_of = {}
    for values in (False, True):
        model = replace(tiny.llama(vocab_size=1024), task="reward", head="values" if values else "")
        made = huggingface_workload(model, sequence_length=64, effective_batch_size=8)
        bytes_of[values] = peak(traced(replace(made, traits=None), **knobs))
    logits = 2 * 8 * 64 * 1024 * (2 + 4)  # of both texts
    assert bytes_of[True] > logits > bytes_of[False]


def test_embeddings_are_told_from_those_of_their_micro_batch() -> None:
    torch.manual_seed(0)
    made = workload_of(**EMBEDDED)
    model: Any = made.model()
    batch = made.batch(2)
    assert set(batch) == {"input_ids"}
    vectors = model.model(batch["input_ids"].flatten(0, 1)).last_hidden_state[:, -1]
    texts, near, far = functional.normalize(vectors, dim=-1).view(2, 3, -1).unbind(dim=1)
    scores = 10 * texts @ torch.cat([near, far]).T
    expected = functional.cross_entropy(scores, torch.arange(2))
    assert made.loss is not None
    assert made.loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    # each by itself, without a second forward of the whole
    assert not hasattr(made.loss, "represent")


def test_heads_of_models_that_see_are_new_and_trained_whole() -> None:
    made = workload_of(**CLASSES)
    setup = build(made, {"lora_rank": 4, "lora_targets": "layers"}, CPU)
    model: Any = setup.model
    assert tuple(model.score.weight.shape) == (7, 32)
    assert model.score.weight.requires_grad
    assert not hasattr(model.score, "lora_A")
    assert not [name for name, _ in model.named_parameters() if name.startswith("lm_head")]
    assert type(model).__name__ == "Qwen2_5_VLForSequenceClassification"
    setup.close()


@pytest.mark.parametrize("fields", OF_TEXTS, ids=str)
def test_such_a_workload_is_made_again_from_its_source(fields: dict[str, Any]) -> None:
    model = replace(model_of(**fields), source={"kind": "preset", "model": "gpt2"})
    source = {**model.source, **model.changed}
    again = workload_from_source(source, {"task": fields["task"], "sequence_length": 16})
    assert isinstance(again.model, HuggingFaceModel)
    assert again.model.changed == model.changed
    with pytest.raises(InputError, match="texts of a sample"):
        workload_from_source({**source, "texts": 0}, {"task": fields["task"]})
