"""Sample pictures while a denoiser is trained: as its pipeline paints them, and nothing else is learnt."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from autofit.api.sample_pictures import SamplePictures
from autofit.api.train import train
from autofit.core.errors import InputError
from autofit.core.layout import Layout
from autofit.models import resolve
from autofit.models.diffusion import samples
from autofit.models.diffusion.pipeline import read_pipeline
from autofit.models.losses.diffusion import Diffusion, schedule_options
from tests.api.test_train_pictures import LORA, PROMPT_TOKENS, Case, latents_file
from tests.cli.command import RESULT
from tests.models.diffusion.small import write_pipeline
from tests.models.diffusion.whole import write_whole

PROMPTS = ["a cat", "a dog"]
# of a scheduler of diffusers, which hands a tensor to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(samples, "STEPS", 2)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two pictures of which one has a caption."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(folder / f"{number}.png")
    (folder / "1.txt").write_text("a cow")
    return folder


def pixels(file: Path) -> Any:
    return np.asarray(Image.open(file), dtype=np.float32)


def painted(model: Path, name: str) -> Any:
    """The first prompt, as the whole pipeline paints it with untrained weights."""
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    longest = {}
    if name in PROMPT_TOKENS:
        longest["max_sequence_length"] = 12
    else:
        pipeline.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
            pipeline.scheduler.config, timestep_spacing="linspace"
        )
    made = pipeline(
        PROMPTS[0],
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        **longest,
    )
    return np.asarray(made.images[0], dtype=np.float32)


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_samples_are_pictures_of_the_pipeline_and_change_nothing_else(
    name: str, tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", name)
    case = Case(tmp_path, model, LORA, name)
    output = tmp_path / "out"
    options: dict[str, Any] = {"weights": model, "steps": 3, "lr": 0.3}
    sampled = case.train(pictures, output=output, sample_every=2, sample_prompts=PROMPTS, **options)
    plain = case.train(pictures, **options)
    assert [step.loss for step in sampled.history] == [step.loss for step in plain.history]

    folder = output / "samples"
    assert f"sample pictures every 2 steps, in {folder}: a cat; a dog" in case.notes
    made = {file.name: pixels(file) for file in sorted(folder.iterdir())}
    assert list(made) == [f"step-{step:06d}-{number}.png" for step in (0, 2) for number in (1, 2)]
    assert {picture.shape for picture in made.values()} == {(64, 64, 3)}
    assert len({picture.tobytes() for picture in made.values()}) == 4
    assert np.abs(made["step-000000-1.png"] - painted(model, name)).max() <= 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_samples_of_weights_of_16_bits_and_of_captions_are_gone_on_with(
    precision: str, tmp_path: Path, pictures: Path
) -> None:
    model = write_whole(tmp_path / "model", "sdxl")
    case = Case(tmp_path, model, LORA | {"precision": precision}, "sdxl")
    options: dict[str, Any] = {"weights": model, "output": tmp_path / "out", "sample_every": 2}
    case.train(pictures, steps=2, **options)
    resumed = case.train(pictures, steps=4, resume=True, **options)
    assert len(resumed.history) == 4
    names = sorted(file.name for file in (tmp_path / "out" / "samples").iterdir())
    assert names == ["step-000000-1.png", "step-000002-1.png", "step-000004-1.png"]
    assert any(note.endswith(": a cow") for note in case.notes)


def test_samples_that_cannot_be_made_are_refused(tmp_path: Path, pictures: Path) -> None:
    model = write_whole(tmp_path / "model", "sd")
    case = Case(tmp_path, model, LORA, "sd")
    output = tmp_path / "out"
    given: dict[str, Any] = {"weights": model, "output": output, "sample_every": 2}
    for changed, words in (
        ({"output": None}, "have nowhere to be written to"),
        ({"weights": None}, "need a VAE and text encoders, and no weights are given"),
        ({"sample_every": 0}, "sample_every must be a positive number of steps"),
        ({"sample_prompts": "a cat"}, "sample_prompts must be a list of texts"),
        ({"sample_every": None, "sample_prompts": PROMPTS}, "none are to be made"),
        ({"loss_options": {"prediction": "flow"}}, "UNet2DConditionModel that predicts flow"),
    ):
        with pytest.raises(InputError, match=words):
            case.train(pictures, **given | changed)

    data = latents_file(tmp_path / "latents.safetensors", model)
    with pytest.raises(InputError, match="has no captions"):
        case.train(data, **given)
    case.train(data, steps=1, sample_prompts=PROMPTS, **given)
    assert len(list((output / "samples").iterdir())) == 2


def test_samples_are_refused_where_devices_divide_the_model(tmp_path: Path) -> None:
    sd = read_pipeline(write_pipeline(tmp_path / "sd", "sd"))
    latents: Any = resolve(str(tmp_path / "sd"), resolution=64).batch
    asking = SamplePictures(sd, Diffusion(), tmp_path, latents, {}, 2, tmp_path)
    setup: Any = SimpleNamespace(ranks=SimpleNamespace(layout=Layout(pipeline=2)))
    with pytest.raises(InputError, match="devices divide layers, tokens or blocks"):
        asking.ask(setup, 1)


def test_samples_are_of_denoisers_whose_encoders_are_known(tmp_path: Path) -> None:
    wan = read_pipeline(write_pipeline(tmp_path / "wan", "wan"))
    with pytest.raises(InputError, match="no sample pictures are made of WanTransformer3DModel"):
        samples.check_sampled(wan, Diffusion(wan.kind, **schedule_options(wan.scheduler)))

    result = tmp_path / "result.yaml"
    result.write_text(RESULT)
    with pytest.raises(InputError, match="is no model of pictures"):
        train(result, tmp_path / "data.txt", sample_every=2)
