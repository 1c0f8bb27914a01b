"""`autofit train` of denoisers: on pictures with captions or on latents, to adapters that pipelines load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch
import transformers
import yaml
from PIL import Image

from autofit.api.fit import Trained
from autofit.api.train import train
from autofit.core.errors import InputError
from autofit.core.events import Event, Note
from autofit.models import resolve
from tests.models.diffusion.small import write_pipeline
from tests.models.diffusion.whole import write_whole

LORA = {"lora_rank": 4, "lora_targets": "attention", "micro_batch_size": 1}
PROMPT_TOKENS = {"sd3": 77 + 12, "flux": 12}


class Case:
    """A pipeline, a result that names it, and how it is trained: 64 pixels, effective batch 2."""

    def __init__(
        self, folder: Path, model: Path, config: dict[str, Any], name: str, **asked: Any
    ) -> None:
        self.folder, self.model = folder, model
        source = {"kind": "directory", "path": str(model), "resolution": "64", **asked}
        if name in PROMPT_TOKENS:
            source["prompt_tokens"] = PROMPT_TOKENS[name]
        content = {
            "autofit": 1,
            "model": name,
            "workload": {"task": "diffusion", "effective_batch_size": 2},
            "source": source,
            "hardware": {"device": "cpu"},
            "config": config,
        }
        (folder / "result.yaml").write_text(yaml.safe_dump(content))
        self.notes: list[str] = []

    def heard(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)

    def train(self, data: Path, **options: Any) -> Trained:
        given = {"lr": 1e-2, "steps": 3, "listener": self.heard, **options}
        return train(self.folder / "result.yaml", data, **given)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures of other sizes than are trained, two of them with captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, size in enumerate([(90, 60), (64, 64), (50, 70)]):
        colours = Image.linear_gradient("L").resize(size).convert("RGB")
        colours.save(folder / f"{number}.png")
    (folder / "0.txt").write_text("a cat\n")
    (folder / "2.txt").write_text("a dog")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def painted(pipeline: Any) -> torch.Tensor:
    """The latents of a picture that a pipeline makes in two steps."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    made = pipeline(
        "a cat",
        height=64,
        width=64,
        num_inference_steps=2,
        generator=generator,
        output_type="latent",
        **({"max_sequence_length": 12} if "Flux" in type(pipeline).__name__ else {}),
    )
    return made.images


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_adapters_of_pictures_are_loaded_by_their_pipeline(
    name: str, tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", name)
    case = Case(tmp_path, model, LORA, name)
    output = tmp_path / "out"
    trained = case.train(pictures, weights=model, output=output)
    assert len(trained.history) == 3
    assert "without a caption: 1 of 3 pictures." in case.notes

    folder = "unet" if name in ("sd", "sdxl") else "transformer"
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(model)
    plain = painted(pipeline)
    pipeline.load_lora_weights(output / "model")
    adapted = painted(pipeline)
    assert not torch.allclose(adapted, plain, atol=1e-4)

    if folder == "unet":
        pipeline.unload_lora_weights()
        torch.testing.assert_close(painted(pipeline), plain)
        pipeline.load_lora_weights(output / "model", weight_name="kohya.safetensors")
        torch.testing.assert_close(painted(pipeline), adapted, rtol=1e-4, atol=1e-5)

    setattr(pipeline, folder, trained.model.eval())
    torch.testing.assert_close(painted(pipeline), adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_adapters_of_text_encoders_are_loaded_with_those_of_the_denoiser(
    name: str, tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", name)
    config = {
        **LORA,
        "lora_targets": "attention+fc1+fc2" + ("+text_projection" if name == "sdxl" else ""),
    }
    case = Case(tmp_path, model, config, name, train_text_encoders=True)
    output = tmp_path / "out"
    trained = case.train(pictures, weights=model, output=output, eval_data=pictures)
    assert len(trained.history) == 3
    assert "without a caption: 1 of 3 pictures." in case.notes

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(model)
    plain = painted(pipeline)
    pipeline.load_lora_weights(output / "model")
    adapted = painted(pipeline)
    assert not torch.allclose(adapted, plain, atol=1e-4)
    told = encoded(pipeline)

    pipeline.unload_lora_weights()
    torch.testing.assert_close(painted(pipeline), plain)
    assert not torch.allclose(encoded(pipeline), told, atol=1e-4)
    pipeline.load_lora_weights(output / "model", weight_name="kohya.safetensors")
    torch.testing.assert_close(painted(pipeline), adapted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoded(pipeline), told, rtol=1e-4, atol=1e-5)

    for folder, part in trained.model.named_children():
        setattr(pipeline, folder, part.eval())
    torch.testing.assert_close(painted(pipeline), adapted, rtol=1e-4, atol=1e-5)

    written = safetensors.torch.load_file(output / "model" / "kohya.safetensors")
    prefixes = {key.partition("_text_model")[0] for key in written if key.startswith("lora_te")}
    assert prefixes >= ({"lora_te"} if name == "sd" else {"lora_te1", "lora_te2"})


def test_no_samples_are_made_while_text_encoders_are_trained(
    tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", "sd")
    case = Case(tmp_path, model, LORA, "sd", train_text_encoders=True)
    with pytest.raises(InputError, match="while text encoders are trained"):
        case.train(pictures, weights=model, output=tmp_path / "out", sample_every=1)


def encoded(pipeline: Any) -> torch.Tensor:
    """What the text encoders of a pipeline make of a caption."""
    with torch.no_grad():
        return pipeline.encode_prompt(
            prompt="a cat",
            device="cpu",
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
        )[0]


def test_all_weights_of_text_encoders_are_trained_and_saved_in_their_folders(
    tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", "sd")
    case = Case(tmp_path, model, {"micro_batch_size": 2}, "sd", train_text_encoders=True)
    trained = case.train(pictures, weights=model, output=tmp_path / "out")
    given = diffusers.DiffusionPipeline.from_pretrained(model)
    saved = diffusers.DiffusionPipeline.from_pretrained(
        model,
        unet=diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out/model/unet"),
        text_encoder=transformers.CLIPTextModel.from_pretrained(
            tmp_path / "out/model/text_encoder"
        ),
    )
    assert not torch.allclose(encoded(saved), encoded(given), atol=1e-4)
    for folder, part in trained.model.named_children():
        state = getattr(saved, folder).state_dict()
        for name, weight in part.state_dict().items():
            torch.testing.assert_close(state[name], weight)


def test_tokens_of_a_file_are_those_that_the_text_encoders_have(tmp_path: Path) -> None:
    model = write_pipeline(tmp_path / "model", "sdxl")
    case = Case(tmp_path, model, LORA, "sdxl", train_text_encoders=True)
    batch: Any = resolve(str(model), resolution=64, train_text_encoders=True).batch
    drawn = batch(4)
    tensors = {name: drawn[name] for name in batch.shapes()}
    assert tensors.keys() == {"latents", "prompt_ids", "prompt_ids_2"}
    data = tmp_path / "latents.safetensors"
    safetensors.torch.save_file(tensors, data)
    case.train(data, steps=1)

    for wrong in (tensors["prompt_ids_2"].float(), tensors["prompt_ids_2"] + 60):
        safetensors.torch.save_file({**tensors, "prompt_ids_2": wrong}, data)
        with pytest.raises(InputError, match="prompt_ids_2 must hold whole numbers from 0 to 59"):
            case.train(data, steps=1)


def test_pictures_are_encoded_once_and_again_when_a_caption_changes(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    plain: Callable[..., Any] = diffusers.AutoencoderKL.encode

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(diffusers.AutoencoderKL, "encode", counted)
    model = write_whole(tmp_path / "model", "sd")
    case = Case(tmp_path, model, LORA, "sd")
    first = case.train(pictures, weights=model, steps=1)
    again = case.train(pictures, weights=model, steps=1)
    assert len(calls) == 1
    assert first.history[0].loss == again.history[0].loss
    (pictures / "1.txt").write_text("a cow")
    case.train(pictures, weights=model, steps=1)
    assert len(calls) == 2


def test_pictures_of_several_shapes_are_trained_in_batches_of_one(
    tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", "sdxl")
    case = Case(tmp_path, model, LORA, "sdxl")
    trained = case.train(
        pictures, weights=model, by_shape=True, eval_data=pictures, steps=None, epochs=1
    )
    told = "pictures by shape: 1 of 80x48, 1 of 64x64, 1 of 56x72."
    assert case.notes.count(told) == 2
    assert len(trained.history) == 3  # a batch of each shape, filled up with the same
    assert len(trained.evaluations) == 1


def latents_file(path: Path, model: Path, samples: int = 4) -> Path:
    """Random latents as a file."""
    batch: Any = resolve(str(model), resolution=64).batch
    drawn = batch(samples)
    safetensors.torch.save_file({name: drawn[name] for name in batch.shapes()}, path)
    return path


def test_all_weights_are_trained_on_latents_from_random_ones(tmp_path: Path) -> None:
    model = write_pipeline(tmp_path / "model", "sd")
    data = latents_file(tmp_path / "latents.safetensors", model)
    case = Case(tmp_path, model, {"micro_batch_size": 2}, "sd")
    trained = case.train(data, steps=20, lr=3e-3, output=tmp_path / "out", eval_data=data)
    assert trained.evaluations[-1] < trained.history[0].loss
    saved = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out" / "model")
    for name, weight in trained.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight)


def test_a_resumed_training_draws_the_noise_that_an_unbroken_one_draws(tmp_path: Path) -> None:
    model = write_pipeline(tmp_path / "model", "flux")
    case = Case(tmp_path, model, LORA, "flux")
    batch: Any = resolve(str(model), resolution=64, sequence_length=12).batch
    drawn = batch(6)
    data = tmp_path / "latents.pt"
    torch.save({name: drawn[name] for name in batch.shapes()}, data)

    whole = case.train(data, steps=5)
    options: dict[str, Any] = {"output": tmp_path / "out", "checkpoint_every": 1}
    case.train(data, steps=2, **options)
    resumed = case.train(data, steps=5, resume=True, **options)
    expected = [step.loss for step in whole.history]
    assert [step.loss for step in resumed.history][-3:] == pytest.approx(expected[-3:], rel=1e-5)


def test_pictures_are_listed_in_metadata(tmp_path: Path, pictures: Path) -> None:
    model = write_whole(tmp_path / "model", "sd")
    rows = [{"file_name": "0.png", "text": "a cat"}, {"file_name": "gone.png", "text": "none"}]
    listed = pictures / "metadata.jsonl"
    listed.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    case = Case(tmp_path, model, LORA, "sd")
    with pytest.raises(InputError, match=r"line 2: .*gone\.png is not there"):
        case.train(pictures, weights=model)
    listed.write_text(json.dumps(rows[0]))
    case.train(pictures, weights=model, steps=1)
    assert any("1 picture of" in note for note in case.notes)


def test_what_cannot_be_trained_is_said(tmp_path: Path, pictures: Path) -> None:
    model = write_pipeline(tmp_path / "model", "sd")
    case = Case(tmp_path, model, LORA, "sd")
    with pytest.raises(InputError, match="no weights are given"):
        case.train(pictures)
    with pytest.raises(InputError, match="packing, padding, memory snapshots and teachers are not"):
        case.train(pictures, packing=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="holds no pictures"):
        case.train(empty, weights=model)
    data = tmp_path / "latents.safetensors"
    safetensors.torch.save_file({"latents": torch.zeros(2, 4, 8, 8)}, data)
    with pytest.raises(InputError, match="lacks encoder_hidden_states"):
        case.train(data)
    safetensors.torch.save_file({"latents": torch.zeros(2, 4, 9, 8)}, data)
    with pytest.raises(InputError, match="latents is 2 x 4 x 9 x 8, and the model takes N x 4 x 8"):
        case.train(data)
