"""What peft has put around a model is recognised, whoever put it there."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from autofit.core.tasks import task_of
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.workload import Hyperparameters
from autofit.setup.adapters import (
    adapter_parameters,
    base_of,
    has_adapters,
    new_token_rows,
    plain_name,
)
from autofit.training.checkpoint_policy import CheckpointPolicy
from autofit.training.session import Session
from autofit.training.workload import workload_from
from tests import tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
ROWS = 3


def adapted(model: nn.Module, **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **options))


def resized(folder: Path) -> Any:
    """A saved model that was loaded and given rows for new tokens."""
    torch.manual_seed(0)
    tiny.llama()().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + ROWS, mean_resizing=False)
    return model


def test_a_peft_model_is_known_by_the_model_inside() -> None:
    base = tiny.llama()()
    assert not has_adapters(base)
    assert base_of(base) is base
    model = adapted(base, modules_to_save=["lm_head"])
    assert has_adapters(model)
    assert has_adapters(base)  # its layers are wrapped in place
    assert base_of(model) is base
    assert task_of(model) is task_of(base) is CAUSAL_LM
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapter_parameters(model) == trained
    plain = {name for name, _ in tiny.llama()().named_parameters()}
    assert {plain_name(name) for name, _ in model.named_parameters()} - plain == set(
        map(plain_name, trained)
    )


def test_new_rows_are_seen_where_the_embedding_is_frozen(tmp_path: Path) -> None:
    model = resized(tmp_path)
    assert new_token_rows(model) == 0  # all weights are trained
    tokens = {"embed_tokens": [model.config.vocab_size - 1]}
    assert new_token_rows(adapted(copy.deepcopy(model), trainable_token_indices=tokens)) == 0
    assert new_token_rows(adapted(copy.deepcopy(model))) == ROWS
    assert new_token_rows(adapted(AutoModelForCausalLM.from_pretrained(tmp_path))) == 0
    (tmp_path / "config.json").unlink()
    assert new_token_rows(adapted(model)) == 0  # nothing is known of it


def test_new_rows_that_adapters_do_not_train_are_told_and_saved_with_them(tmp_path: Path) -> None:
    model = resized(tmp_path / "base")
    told: list[str] = []
    workload = tiny.llama_workload()
    session = Session(
        workload=workload_from(model, [workload.batch(4)], None),
        model=model,
        hyperparameters=Hyperparameters(lr=2e-2),
        policy=CheckpointPolicy(tmp_path / "run"),
        callbacks=(),
        listener=told.append,
    )
    session.run({"lora_rank": 2}, "cpu", [workload.batch(4)], steps=1)
    assert any(
        "the token embedding has 3 rows more than the model it was loaded from" in each
        for each in told
    )

    again = resized(tmp_path / "base")
    again.get_input_embeddings().weight.data[-ROWS:] = 1.0  # a user's rows are drawn anew each time
    read = PeftModel.from_pretrained(again, tmp_path / "run" / "model").eval()
    ids = torch.arange(model.config.vocab_size - 5, model.config.vocab_size)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
