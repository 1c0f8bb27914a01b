"""Training for quantised inference: layers round, and a step takes what is predicted of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.export.importers import importer_of
from autofit.models import resolve, with_rounding, workload_from_source
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.huggingface import huggingface_workload
from autofit.techniques import canonicalize
from autofit.training.meta_model import meta_model_from
from tests import tiny
from tests.estimate.traced import peak, traced, tracked
from tests.tiny import CPU

pytest.importorskip("torchao.quantization.qat")
ROUNDS = FakeQuantisation(32)


def workload(**changes: Any) -> Workload:
    model = replace(tiny.llama(num_hidden_layers=4, hidden_size=64, **changes), rounds=ROUNDS)
    made = huggingface_workload(model, sequence_length=16, effective_batch_size=4)
    return replace(made, traits=None)


def test_weights_are_rounded_in_every_product_and_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = tiny.llama()()
    weights = {name: weight.clone() for name, weight in plain.named_parameters()}
    batch = tiny.llama_workload().batch(2)
    before = plain(**batch).logits

    ROUNDS.apply(plain)
    after = plain(**batch).logits
    assert not torch.allclose(before, after)
    assert (before - after).abs().max() < 0.5 * before.abs().max()
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights[name])
    plain(**batch).loss.backward()
    assert all(weight.grad is not None for weight in plain.parameters())


def test_tied_weights_stay_tied_without_weights() -> None:
    model = replace(tiny.llama(tie_word_embeddings=True), rounds=ROUNDS)
    made = meta_model_from(model)
    assert made.lm_head.weight is made.model.embed_tokens.weight


@pytest.mark.parametrize(
    "knobs",
    [
        {"precision": "bf16", "micro_batch_size": 2},
        {"precision": "bf16-mixed", "activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_bytes_are_those_of_real_steps(knobs: dict[str, Any]) -> None:
    made = workload()
    measured = tracked(made, knobs)
    assert peak(traced(made, **knobs)) == measured
    (nbytes,), _ = predict_all(made, CPU, [canonicalize(knobs, made, CPU)], measuring=0)
    assert nbytes == pytest.approx(measured, rel=0.01)


def test_a_head_that_a_fused_loss_reads_stays_plain() -> None:
    keys = {"base_model": "m", "qat.weight_dtype": "int4", "liger_fused_linear_cross_entropy": True}
    rounds = importer_of(keys, "file").rounds(keys)
    assert rounds == FakeQuantisation(128, False, of_head=False)
    assert FakeQuantisation.of_source(rounds.to_source()) == rounds

    model = replace(tiny.llama(), rounds=FakeQuantisation(32, of_head=False))()
    assert type(model.lm_head) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear


def test_rounded_copies_take_memory() -> None:
    knobs = {"precision": "bf16-mixed"}
    plain = replace(workload(), model=replace(workload().model, rounds=None))
    assert peak(traced(workload(), **knobs)) > 1.1 * peak(traced(plain, **knobs))


def test_it_is_made_again_from_a_result() -> None:
    made = with_rounding(resolve("smollm2-135m", sequence_length=64), FakeQuantisation(64, False))
    assert made.source["rounds"] == {"group_size": 64, "of_inputs": False}
    assert workload_from_source(made.source, made.summary()).model == made.model
    assert with_rounding(made, None) is made
    for wrong in (3, {}, {"group_size": "x"}):
        with pytest.raises(InputError):
            workload_from_source({**made.source, "rounds": wrong}, made.summary())
    with pytest.raises(InputError, match="no whole number of groups of 48"):
        meta_model_from(replace(tiny.llama(), rounds=FakeQuantisation(48)))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"qat.weight_dtype": "int4", "qat.activation_dtype": "int8"}, None),
        ({"qat.weight_dtype": "int4", "qat.group_size": 64}, None),
        ({}, None),
        ({"qat.weight_dtype": "nvfp4"}, "nvfp4 weights"),
        ({"qat.weight_dtype": "int4", "qat.quantize_embedding": True}, "embeddings"),
        ({"qat.weight_dtype": "int4", "adapter": "lora"}, "adapters"),
    ],
)
def test_what_axolotl_rounds(keys: dict[str, Any], reason: str | None) -> None:
    keys = {"base_model": "some/model", **keys}
    importer = importer_of(keys, "file")
    refused = importer.refuse(keys)
    if reason is not None:
        assert reason in str(refused)
        return

    assert refused is None
    found = importer.rounds(keys)
    if "qat.weight_dtype" not in keys:
        assert found is None
    else:
        of_inputs = "qat.activation_dtype" in keys
        assert found == FakeQuantisation(keys.get("qat.group_size", 128), of_inputs)
