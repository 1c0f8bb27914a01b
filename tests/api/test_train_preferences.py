"""`autofit train` on preferences: each task learns, and what a reference says is found once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autofit
from autofit import losses
from autofit.core.errors import InputError
from tests import tiny
from tests.api.trained_files import Run
from tests.data.letters import letters

LLAMA = {
    **tiny.LLAMA,
    "vocab_size": 40,
    "pad_token_id": 0,
    "architectures": ["LlamaForCausalLM"],
}
PAIRS = [
    {"prompt": letter * 2, "chosen": letter * 3, "rejected": "z" + letter} for letter in "abcdefgh"
]
MARKED = [
    {"prompt": letter * 2, "completion": answer, "label": answer != "z"}
    for letter in "abcd"
    for answer in (letter * 2, "z")
]


def run_of(folder: Path, task: str, **knobs: Any) -> Run:
    run = Run(folder, task, LLAMA, length=12)
    run.content["config"] |= knobs
    letters().save_pretrained(run.model)
    return run


@pytest.mark.parametrize(
    ("task", "knobs"),
    [
        ("dpo", {"reference": "precomputed"}),
        ("dpo", {"lora_rank": 4, "reference": "adapter-off"}),
        ("kto", {"reference": "precomputed"}),
        ("orpo", {}),
        ("simpo", {}),
        ("reward", {"lora_rank": 4}),
    ],
)
def test_it_learns(tmp_path: Path, task: str, knobs: dict[str, Any]) -> None:
    run = run_of(tmp_path, task, **knobs)
    seen = run.losses(run.data(*(MARKED if task == "kto" else PAIRS)), epochs=8)
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])


def test_each_way_to_ask_the_reference_trains_alike(tmp_path: Path) -> None:
    run = run_of(tmp_path, "dpo", lora_rank=4)
    data = run.data(*PAIRS)
    found = []
    for value in ("resident", "adapter-off", "precomputed"):
        run.content["config"]["reference"] = value
        found.append(run.losses(data, epochs=2))
    assert found[0][0] == pytest.approx(0.6931, abs=1e-4)  # ln 2: nothing was learnt yet
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize(
    "knobs", [{"reference": "resident"}, {"lora_rank": 4, "reference": "adapter-off"}]
)
def test_a_resumed_run_asks_the_model_before_all_training(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    run = run_of(tmp_path, "dpo", **knobs)
    data = run.data(*PAIRS)
    whole = run.losses(data, epochs=4, output=tmp_path / "whole")
    run.train(data, epochs=2, output=tmp_path / "out")
    assert run.losses(data, epochs=4, output=tmp_path / "out", resume=True) == whole


def test_a_resumed_run_reads_what_the_reference_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, "dpo", reference="precomputed")
    data = run.data(*PAIRS)
    whole = run.losses(data, epochs=4, eval_data=data, output=tmp_path / "whole")

    out = tmp_path / "out"
    run.train(data, epochs=2, eval_data=data, output=out)
    said = load_file(out / "reference" / "0.safetensors")["reference"]
    assert said.shape == (len(PAIRS), 2)
    resumed = run.losses(data, epochs=4, eval_data=data, output=out, resume=True)
    assert resumed == whole  # of another reference, losses would be others

    reference = out / "reference" / "0.safetensors"
    others = run.data(*({**row, "chosen": "zzz"} for row in PAIRS), name="others.jsonl")
    run.train(others, epochs=5, output=out, resume=True)  # as many rows, of other texts
    assert not torch.equal(load_file(reference)["reference"], said)


def test_two_devices_share_the_samples_and_agree(tmp_path: Path) -> None:
    run = run_of(tmp_path, "dpo", reference="precomputed")
    data = run.data(*PAIRS)
    alone = run.losses(data, epochs=1)
    run.content["config"] |= {"data_parallel": "ddp"}
    run.content |= {"devices": 2}
    assert run.losses(data, epochs=1, devices=2) == pytest.approx(alone, rel=1e-4)


def test_a_teacher_is_learnt_from(tmp_path: Path) -> None:
    run = run_of(tmp_path, "distill")
    teacher = tmp_path / "teacher"
    tiny.llama(vocab_size=40)().save_pretrained(teacher)
    run.content["source"]["teacher"] = {"kind": "directory", "path": str(teacher)}
    data = run.data(*({"text": letter * 6} for letter in "abcdefgh"))
    seen = run.losses(data, epochs=6, teacher_weights=teacher)
    assert seen[-1] < seen[0]
    with pytest.raises(InputError, match="the weights of the teacher teacher are missing"):
        run.train(data, weights=save_model(run))


def save_model(run: Run) -> Path:
    tiny.llama(vocab_size=40)().save_pretrained(run.folder / "weights")
    return run.folder / "weights"


def test_options_of_the_loss(tmp_path: Path) -> None:
    run = run_of(tmp_path, "dpo", reference="precomputed")
    data = run.data(*PAIRS)
    for options, message in (
        ({"gamma": 1}, "unknown option of the loss 'gamma'"),
        ({"beta": "much"}, "beta cannot be 'much'"),
        ({"kind": "best"}, "kind must be one of"),
    ):
        with pytest.raises(InputError, match=message):
            run.train(data, loss_options=options)
    plain = run.losses(data, epochs=2)
    assert run.losses(data, epochs=2, loss_options={"beta": 0.9}) != plain


def test_in_python_a_copy_is_made_of_the_model_as_it_is() -> None:
    workload = tiny.preference_workload("dpo")
    model = tiny.living(workload)
    batch = {name: part for name, part in workload.batch(4).items() if name != "reference"}
    trained = autofit.fit(
        model, [batch], loss=losses.DPO(), config={"micro_batch_size": 2}, epochs=3, lr=1e-2
    )
    history = [step.loss for step in trained.history]
    assert history[0] == pytest.approx(0.6931, abs=1e-4)
    assert history[2] < history[1] < history[0]
    with pytest.raises(InputError, match="the batches do not hold"):
        autofit.fit(model, [batch], loss=losses.DPO(), config={"reference": "precomputed"})


def test_frozen_models_are_not_trained_and_get_no_dropout() -> None:
    teacher, student = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    before = teacher.weight.clone()

    def imitate(models: Any, batch: torch.Tensor) -> torch.Tensor:
        return (models["model"](batch) - models["teacher"](batch)).square().mean()  # type: ignore[no-any-return]

    batches = [torch.randn(8, 4) for _ in range(20)]
    trained = autofit.fit(
        student, batches, loss=imitate, frozen={"teacher": teacher}, config={}, lr=0.05, epochs=3
    )
    assert trained.history[-1].loss < 0.2 * trained.history[0].loss
    assert torch.equal(teacher.weight, before)
    assert teacher.training and teacher.weight.requires_grad  # as it came
    with pytest.raises(InputError, match="frozen must be a mapping"):
        autofit.fit(student, batches, loss=imitate, frozen=[teacher], config={})  # type: ignore[arg-type]
