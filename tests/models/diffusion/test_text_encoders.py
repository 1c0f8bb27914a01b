"""Text encoders that are trained beside their UNet: encoded as pipelines do it, with the same gradients."""

import json
from pathlib import Path
from typing import Any

import cloudpickle
import diffusers
import pytest
import torch
import transformers

import autofit
from autofit.core.errors import InputError
from autofit.models import resolve, workload_from_source
from autofit.models.diffusion.text_encoders import CLASSES, PROMPTS, TOKENIZERS, parts_of
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import BlockStreamer
from autofit.training.build import build
from autofit.training.inspect import inspect_workload
from autofit.training.meta_model import meta_model_from
from autofit.training.step import accumulate
from tests.late_lane import LateLane
from tests.models.diffusion.small import TEXT_ENCODERS, write_pipeline
from tests.models.diffusion.test_losses import CLOSE, as_scripts_do
from tests.models.diffusion.whole import write_whole
from tests.streaming import resident_bytes, streamed_bytes
from tests.tiny import CPU

NAMES = tuple(TEXT_ENCODERS)
CAPTIONS = ["a cat", "", "a cow in a field of grass", "z" * 200]
UNLEARNT = ("layers.1", "final_layer_norm")  # of SDXL's first encoder


def workload_of(folder: Path, **given: Any) -> Any:
    return resolve(
        str(folder),
        resolution=64,
        effective_batch_size=4,
        train_text_encoders=True,
        **given,
    )


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_pipelines_own_encoding(
    name: str, tmp_path: Path
) -> None:
    folder = write_whole(tmp_path / name, name)
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder)
    workload = workload_of(folder)
    setup = build(workload, {"micro_batch_size": 2, "activation_checkpointing": "full"}, CPU)
    parts = parts_of(setup.model)
    batch = workload.batch(4)
    for encoder in TEXT_ENCODERS[name]:
        tokenizer = getattr(pipeline, TOKENIZERS[encoder])
        read = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
        batch[PROMPTS[encoder]] = read.input_ids
        setattr(pipeline, encoder, parts[encoder])

    loss = accumulate(setup, batch)
    found = {name: weight.grad for name, weight in setup.model.named_parameters()}
    setup.model.zero_grad()
    encoded = pipeline.encode_prompt(
        prompt=CAPTIONS,
        device="cpu",
        num_images_per_prompt=1,
        do_classifier_free_guidance=False,
    )
    told = {**batch, "encoder_hidden_states": encoded[0], "pooled_projections": encoded[-2]}
    expected = as_scripts_do(name, parts["unet"], told)
    expected.backward()

    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    learnt = set()
    for weight, parameter in setup.model.named_parameters():
        if parameter.grad is None:  # what is after the layer that SDXL takes
            assert found[weight] is None
            assert name == "sdxl" and weight.startswith("text_encoder.")
            assert any(part in weight for part in UNLEARNT)
        else:
            torch.testing.assert_close(found[weight], parameter.grad, **CLOSE)
            if parameter.grad.abs().sum():
                learnt.add(weight.partition(".")[0])
    assert learnt == {"unet", *TEXT_ENCODERS[name]}
    setup.close()


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_known_and_blocks_come_in_the_order_in_which_they_run(
    name: str, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / name, name)
    alone = inspect_workload(resolve(str(folder), resolution=64), CPU, 2**33)
    workload = workload_of(folder)
    traits = inspect_workload(cloudpickle.loads(cloudpickle.dumps(workload)), CPU, 2**33)
    encoders = TEXT_ENCODERS[name]
    assert traits.blocks == alone.blocks + 2 * len(encoders)
    assert traits.sdpa and traits.attention and traits.splits and not traits.dropout
    assert traits.adapter_parameters > alone.adapter_parameters
    assert traits.fingerprint != alone.fingerprint
    assert "Text encoders are trained, on prompts of 77 tokens" in " ".join(traits.notes)

    model = meta_model_from(workload.model)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    kinds = [type(block).__name__ for block in repeated_blocks(model)]
    assert set(kinds[: 2 * len(encoders)]) == {"CLIPEncoderLayer"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_survives_in_the_source(name: str, tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / name, name)
    first = workload_of(folder, sequence_length=20)
    assert first.source["train_text_encoders"] is True
    again = workload_from_source(first.source, first.summary())
    assert again.batch == first.batch and again.model == first.model
    batch = again.batch(3)
    for encoder in TEXT_ENCODERS[name]:
        ids = batch[PROMPTS[encoder]]
        assert ids.shape == (3, 20) and ids.dtype == torch.int64 and ids.max() < 60
    assert "encoder_hidden_states" not in batch and "pooled_projections" not in batch
    assert ("time_ids" in batch) == (name == "sdxl")
    assert "train_text_encoders" not in resolve(str(folder)).source


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_streamed_with_those_of_the_denoiser(name: str, tmp_path: Path) -> None:
    """Of SDXL's encoders the last layer runs, and of the first no gradient ever reaches it."""
    workload = workload_of(write_pipeline(tmp_path / name, name))
    knobs = {"lora_rank": 4, "micro_batch_size": 2, "activation_checkpointing": "full"}
    setup = build(workload, knobs, CPU)
    batch = workload.batch(4)
    loss = accumulate(setup, batch)
    found = gradients(setup.model)
    assert any(name.startswith("text_encoder.") for name in found)

    blocks = repeated_blocks(setup.model)
    streamer = BlockStreamer(setup.model, blocks, LateLane(), smallest=256)
    assert len(streamer.blocks) == len(blocks)
    for _ in range(2):
        setup.model.zero_grad()
        torch.testing.assert_close(accumulate(setup, batch), loss)
        again = gradients(setup.model)
        assert again.keys() == found.keys()
        for weight, gradient in again.items():
            torch.testing.assert_close(gradient, found[weight], **CLOSE)
    assert resident_bytes(streamer) < streamed_bytes(streamer) / 2
    streamer.close()
    setup.close()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that the weights of a model have."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad.clone()
    return found


@pytest.mark.parametrize("has_state", [False, True])
def test_each_part_is_saved_in_its_folder(has_state: bool, tmp_path: Path) -> None:
    model: Any = workload_of(write_pipeline(tmp_path / "model", "sdxl")).model()
    model.save_pretrained(
        tmp_path / "out", **({"state_dict": model.state_dict()} if has_state else {})
    )
    for folder, part in parts_of(model).items():
        kind: Any = getattr(transformers, CLASSES.get(folder, ""), None)
        saved = (kind or diffusers.UNet2DConditionModel).from_pretrained(tmp_path / "out" / folder)
        for name, weight in part.state_dict().items():
            torch.testing.assert_close(saved.state_dict()[name], weight)


def test_an_estimate_has_the_text_encoders_in_it(tmp_path: Path) -> None:
    model = str(write_pipeline(tmp_path / "model", "sdxl"))
    given: dict[str, Any] = {"gpu": "rtx-4090", "set": {"lora_rank": 4}, "resolution": 64}
    alone = autofit.estimate(model, **given)
    beside = autofit.estimate(model, train_text_encoders=True, **given)
    assert beside.allocated_bytes > alone.allocated_bytes
    assert beside.verdict == "yes"


@pytest.mark.parametrize("model", ["flux-dev", "sd-3.5-medium", "wan-1.3b", "qwen-image"])
def test_other_denoisers_are_refused_in_a_sentence(model: str) -> None:
    with pytest.raises(InputError, match="text encoders are trained beside a UNet"):
        resolve(model, train_text_encoders=True)


def test_other_models_have_no_text_encoders_to_train() -> None:
    with pytest.raises(InputError, match="gpt2 makes no pictures"):
        resolve("gpt2", train_text_encoders=True)
    with pytest.raises(InputError, match="train_text_encoders must be True or False"):
        resolve("sdxl", train_text_encoders="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="train_text_encoders must be True or False"):
        workload_from_source({"kind": "preset", "model": "sdxl", "train_text_encoders": 1}, {})


def changed(path: Path, **keys: Any) -> None:
    """Write other values of keys into a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | keys), encoding="utf-8")


CHANGES = [
    ("model_index.json", {"text_encoder_2": ["transformers", "T5EncoderModel"]}, "has no CLIPText"),
    (
        "model_index.json",
        {"text_encoder": [None, None]},
        "has no CLIPTextModel as its text_encoder",
    ),
    ("text_encoder/config.json", {"hidden_size": 24}, "make 40 numbers where its UNet takes 32"),
    ("text_encoder_2/config.json", {"projection_dim": 30}, "make 30 numbers where its UNet takes"),
    ("text_encoder/config.json", {"vocab_size": "many"}, "has no vocab_size"),
    ("text_encoder/config.json", {"use_attention_mask": True}, "masks the padding"),
]


@pytest.mark.parametrize(("file", "keys", "words"), CHANGES)
def test_configs_that_are_not_of_such_a_pipeline(
    file: str, keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write_pipeline(tmp_path / "model", "sdxl")
    changed(folder / file, **keys)
    with pytest.raises(InputError, match=words):
        workload_of(folder)
    resolve(str(folder))  # nobody looks at them otherwise


def test_prompts_have_no_more_tokens_than_the_encoders_take(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "model", "sd")
    with pytest.raises(InputError, match="takes prompts of 77 tokens, not 78"):
        workload_of(folder, sequence_length=78)
