"""Losses and gradients of preference losses are those of TRL's trainers, on a batch with padding."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

from autofit import losses
from autofit.core.errors import InputError
from tests import tiny

trl = pytest.importorskip("trl")

LENGTHS = ((3, 6, 4), (5, 2, 7), (2, 8, 8), (6, 5, 3))  # of a prompt, a better and a worse answer
Loss = tuple[float, dict[str, torch.Tensor]]


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (length,), generator=generator).tolist()


ROWS = [
    {
        "prompt": tokens(prompt, 10 * row),
        "chosen": tokens(chosen, 10 * row + 1),
        "rejected": tokens(rejected, 10 * row + 2),
    }
    for row, (prompt, chosen, rejected) in enumerate(LENGTHS)
]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    factory = tiny.llama()
    made = factory()
    for weight in made.parameters():
        nn.init.normal_(weight, 0.0, 0.2)
    return made.eval()


def padded(texts: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Prompts with answers as `input_ids`, `attention_mask` and `labels`, padded on the right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    shape = len(texts), longest
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
    }
    for row, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        batch["input_ids"][row, :end] = torch.tensor(prompt + answer)
        batch["attention_mask"][row, :end] = 1
        batch["labels"][row, len(prompt) : end] = torch.tensor(answer)
    return batch


def pairs() -> dict[str, torch.Tensor]:
    both = [(row["prompt"], row[answer]) for row in ROWS for answer in ("chosen", "rejected")]
    return {name: tensor.unflatten(0, (-1, 2)) for name, tensor in padded(both).items()}


def ours(loss: Any, batch: dict[str, Any], **frozen: nn.Module) -> Loss:
    policy = model()
    models = {"model": policy, **frozen} if frozen else policy
    arguments = [models, batch]
    if hasattr(loss, "over_batch"):
        with torch.no_grad():
            arguments.append(loss.over_batch(models, batch))
    value = loss(*arguments)
    value.backward()
    return float(value), gradients(policy)


def gradients(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None
    }


def assert_equal(found: Loss, expected: Loss) -> None:
    # log-probabilities around -5 are rounded by up to 3e-7
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=3e-7)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5 * largest)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(61)} | {"<pad>": 61, "</s>": 62}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="</s>", unk_token="t0"
    )


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL's experimental trainers
        yield {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": len(ROWS),
            "use_cpu": True,
            "report_to": [],
            "bf16": False,
            "gradient_checkpointing": False,
        }


def theirs(trainer: Any, inputs: dict[str, Any]) -> Loss:
    trainer.model.eval()
    value = trainer.compute_loss(trainer.model, inputs)
    value.backward()
    return float(value.detach()), gradients(trainer.model)


def dataset() -> Dataset:
    words = [
        {name: " ".join(f"t{token}" for token in ids) for name, ids in row.items()} for row in ROWS
    ]
    return Dataset.from_list(words)


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.2)]
)
def test_dpo(kind: str, smoothing: float, tokenizer: Any, arguments: dict[str, Any]) -> None:
    reference = model(seed=1)
    config = trl.DPOConfig(**arguments, loss_type=kind, label_smoothing=smoothing, beta=0.3)
    trainer = trl.DPOTrainer(
        model(), reference, config, train_dataset=dataset(), processing_class=tokenizer
    )
    inputs = both_halves(pairs())
    expected = theirs(trainer, inputs)

    loss = losses.DPO(beta=0.3, kind=kind, label_smoothing=smoothing)
    assert_equal(ours(loss, pairs(), reference=reference), expected)

    precomputed = {**pairs(), "reference": loss.precomputed({"reference": reference}, pairs())}
    policy = model()
    value = loss({"model": policy}, precomputed)
    value.backward()
    assert_equal((float(value), gradients(policy)), expected)


def both_halves(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As TRL's collators stack them: all better texts, then all worse ones."""
    stacked = {name: tensor.transpose(0, 1).flatten(0, 1) for name, tensor in batch.items()}
    stacked["completion_mask"] = (stacked.pop("labels") != -100).long()
    return stacked


def test_reward(tokenizer: Any, arguments: dict[str, Any]) -> None:
    from dataclasses import replace

    def scorer() -> nn.Module:
        torch.manual_seed(0)
        made = replace(tiny.llama(pad_token_id=61), task="reward")()
        for weight in made.parameters():
            nn.init.normal_(weight, 0.0, 0.2)
        return made.eval()

    config = trl.RewardConfig(**arguments, center_rewards_coefficient=0.1)
    trainer = trl.RewardTrainer(
        scorer(), config, train_dataset=dataset(), processing_class=tokenizer
    )
    inputs = both_halves(pairs())
    del inputs["completion_mask"]
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 61)
    expected = theirs(trainer, {**inputs, "input_ids": ids})

    batch = pairs()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 61)
    policy = scorer()
    value = losses.Reward(center=0.1)(policy, batch)
    value.backward()
    assert_equal((float(value), gradients(policy)), expected)


def test_kto(tokenizer: Any, arguments: dict[str, Any]) -> None:
    reference = model(seed=1)
    answers = [row["chosen"] for row in ROWS]
    others = answers[-1:] + answers[:-1]
    texts = [
        text
        for row, answer, other in zip(ROWS, answers, others, strict=True)
        for text in ((row["prompt"], answer), (row["prompt"], other))
    ]
    batch = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in padded(texts).items()}
    batch["desirable"] = torch.tensor([1, 0, 0, 1])

    config = trl.KTOConfig(
        **arguments,
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        train_sampling_strategy="sequential",
    )
    rows = dataset().remove_columns("rejected").rename_column("chosen", "completion")
    rows = rows.add_column("label", [True, False, False, True])
    trainer = trl.KTOTrainer(
        model(), reference, config, train_dataset=rows, processing_class=tokenizer
    )
    inputs: dict[str, Any] = {"label": batch["desirable"] == 1}
    for column, prefix in enumerate(("", "KL_")):
        for name in ("input_ids", "attention_mask"):
            inputs[prefix + name] = batch[name][:, column]
        inputs[f"{prefix}completion_mask"] = (batch["labels"][:, column] != -100).long()
    expected = theirs(trainer, inputs)

    loss = losses.KTO(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    assert_equal(ours(loss, batch, reference=reference), expected)


def halves(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As TRL's collator for pairs gives them apart."""
    return {
        f"{name}_{part}": batch[part][:, column]
        for column, name in enumerate(("chosen", "rejected"))
        for part in ("input_ids", "attention_mask", "labels")
    }


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_without_a_reference(name: str, tokenizer: Any, arguments: dict[str, Any]) -> None:
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        options: dict[str, Any] = {"beta": 0.3}
        loss: Any = losses.ORPO(beta=0.3)
    else:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Trainer

        options = {"beta": 2.5, "loss_type": "simpo", "simpo_gamma": 0.8, "cpo_alpha": 0.0}
        loss = losses.SimPO(beta=2.5, gamma=0.8)
    config = Config(**arguments, **options)
    trainer = Trainer(model(), config, train_dataset=dataset(), processing_class=tokenizer)
    trainer.model.eval()
    value, _ = trainer.get_batch_loss_metrics(trainer.model, halves(pairs()))
    value.backward()
    expected = float(value.detach()), gradients(trainer.model)
    assert_equal(ours(loss, pairs()), expected)


@pytest.mark.parametrize("mixture", [0.0, 0.3, 1.0])
def test_distillation(mixture: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    teacher = model(seed=1)
    batch = padded([(row["prompt"], row["chosen"]) for row in ROWS])
    policy = model()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    value = GKDTrainer.generalized_jsd_loss(
        policy(**inputs).logits[:, :-1],
        teacher(**inputs).logits[:, :-1].detach(),
        labels=batch["labels"][:, 1:],
        beta=mixture,
    )
    value.backward()
    expected = float(value.detach()), gradients(policy)
    assert_equal(ours(losses.Distill(mixture=mixture), batch, teacher=teacher), expected)


@pytest.mark.parametrize("mixture", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_distillation_of_the_most_likely_tokens(mixture: float, temperature: float) -> None:
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdpo.loss_utils import add_tail_bucket

    teacher = model(seed=1)
    batch = padded([(row["prompt"], row["chosen"]) for row in ROWS])
    policy = model()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    theirs = (teacher(**inputs).logits[:, :-1].detach() / temperature).log_softmax(-1)
    mine = (policy(**inputs).logits[:, :-1] / temperature).log_softmax(-1)
    tokens = theirs.topk(5).indices
    value = GKDTrainer.generalized_jsd_loss(
        add_tail_bucket(mine.gather(-1, tokens)),
        add_tail_bucket(theirs.gather(-1, tokens)),
        labels=batch["labels"][:, 1:],
        beta=mixture,
    )
    value.backward()
    expected = float(value.detach()), gradients(policy)
    loss = losses.Distill(mixture=mixture, temperature=temperature, top_k=5)
    assert_equal(ours(loss, batch, teacher=teacher), expected)


def completions() -> dict[str, torch.Tensor]:
    """Prompts padded on the left and completions on the right, as TRL's generation gives them."""
    prompt = max(len(row["prompt"]) for row in ROWS)
    completion = max(len(row["chosen"]) for row in ROWS)
    made = {
        "input_ids": torch.zeros(len(ROWS), prompt + completion, dtype=torch.long),
        "attention_mask": torch.zeros(len(ROWS), prompt + completion, dtype=torch.long),
        "labels": torch.full((len(ROWS), prompt + completion), -100),
    }
    for number, row in enumerate(ROWS):
        begins = prompt - len(row["prompt"])
        ends = prompt + len(row["chosen"])
        made["input_ids"][number, begins:ends] = torch.tensor(row["prompt"] + row["chosen"])
        made["attention_mask"][number, begins:ends] = 1
        made["labels"][number, prompt:ends] = torch.tensor(row["chosen"])

    generator = torch.Generator().manual_seed(7)
    made["advantages"] = torch.randn(len(ROWS), generator=generator)
    made["old"] = -4 + torch.randn(len(ROWS), completion, generator=generator)
    made["reference"] = -4 + torch.randn(len(ROWS), completion, generator=generator)
    return made


@pytest.mark.parametrize(
    ("kind", "beta", "epsilon_high", "temperature", "has_old"),
    [
        ("dapo", 0.0, 0.0, 1.0, True),
        ("dapo", 0.04, 0.28, 0.7, True),
        ("grpo", 0.04, 0.0, 1.0, True),
        ("bnpo", 0.0, 0.28, 0.7, True),
        ("dr_grpo", 0.0, 0.0, 1.0, True),
        ("dapo", 0.0, 0.0, 1.0, False),
    ],
)
def test_grpo(
    kind: str,
    beta: float,
    epsilon_high: float,
    temperature: float,
    has_old: bool,
    tokenizer: Any,
    arguments: dict[str, Any],
) -> None:
    batch = completions()
    width = batch["old"].shape[1]
    if not has_old:
        del batch["old"]
    options: dict[str, Any] = {"beta": beta, "temperature": temperature}
    config = trl.GRPOConfig(
        **arguments,
        temperature=temperature,
        loss_type=kind,
        epsilon_high=epsilon_high or None,
        num_generations=len(ROWS),
        max_completion_length=width,
    )
    rows = Dataset.from_list([{"prompt": "t1 t2"}])
    trainer = trl.GRPOTrainer(
        model(),
        lambda completions, **_: [0.0] * len(completions),
        config,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.beta = beta  # set before, its trainer loads a reference by the model's name
    mask = batch["attention_mask"]
    inputs = {
        "prompt_ids": batch["input_ids"][:, :-width],
        "prompt_mask": mask[:, :-width],
        "completion_ids": batch["input_ids"][:, -width:],
        "completion_mask": mask[:, -width:],
        "advantages": batch["advantages"],
        "num_items_in_batch": mask[:, -width:].sum(),
        "ref_per_token_logps": batch["reference"],
    }
    if has_old:
        inputs["old_per_token_logps"] = batch["old"]
    expected = theirs(trainer, inputs)

    loss = losses.GRPO(kind=kind, epsilon_high=epsilon_high, **options)
    policy = model()
    value = loss({"model": policy} if beta else policy, batch)
    value.backward()
    assert_equal((float(value), gradients(policy)), expected)


def test_grpo_asks_the_reference_that_is_there() -> None:
    batch = completions()
    reference = model(seed=1)
    loss = losses.GRPO(beta=0.04)
    given = {**batch, "reference": loss.precomputed({"reference": reference}, batch)}
    policy = model()
    value = loss({"model": policy}, given)
    value.backward()
    assert_equal(ours(loss, batch, reference=reference), (float(value), gradients(policy)))
    del batch["reference"]
    with pytest.raises(InputError, match='the batches lack "reference"'):
        loss({"model": policy}, batch)
