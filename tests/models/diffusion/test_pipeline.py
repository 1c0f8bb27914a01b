"""A pipeline of diffusers becomes a workload: by its directory or a preset, of the sizes that are asked for."""

import json
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import autofit
from autofit.core.errors import InputError
from autofit.models import resolve, workload_from_source
from autofit.models.diffusion.latents import timesteps
from autofit.setup.layers import weights_read_by
from autofit.training.inspect import inspect_workload
from autofit.training.meta_model import meta_model_from
from tests.models.diffusion.small import SMALL, write_pipeline
from tests.tiny import CPU


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path / "pictures", "flux")


@pytest.mark.parametrize("name", SMALL)
def test_a_directory_is_a_workload_whose_facts_are_known(name: str, tmp_path: Path) -> None:
    workload = resolve(str(write_pipeline(tmp_path / name, name)), task="diffusion")
    assert (workload.task, workload.unit, workload.name) == ("diffusion", "samples", name)
    again = cloudpickle.loads(cloudpickle.dumps(workload))
    traits = inspect_workload(again, CPU, 2**33)
    assert traits.blocks >= 4
    assert traits.sdpa and traits.attention and traits.splits and traits.adapter_parameters
    model = meta_model_from(workload.model)
    assert traits.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_no_layer_keeps_its_weight_from_being_quantised(name: str, tmp_path: Path) -> None:
    """Their attention reads weights in a method that training never calls."""
    model = meta_model_from(resolve(str(write_pipeline(tmp_path / name, name))).model)
    assert [part for part in model.modules() if weights_read_by(part)] == []


def test_equal_batches_are_drawn_each_time(folder: Path) -> None:
    batch = resolve(str(folder), resolution=64).batch
    first, again = batch(3), batch(3)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert {len(tensor) for tensor in first.values()} == {3}
    assert first["latents"].shape == first["noise"].shape == (3, 16, 8, 8)
    assert not torch.equal(first["latents"], first["noise"])


def test_sizes_and_options_survive_in_the_source(folder: Path) -> None:
    options = {"prediction": "v_prediction"}
    given: dict[str, Any] = {"resolution": "96x64", "sequence_length": 20, "loss_options": options}
    for model in (str(folder), "sdxl"):
        first = resolve(model, effective_batch_size=6, **given)
        again = workload_from_source(first.source, first.summary())
        assert again.batch == first.batch and again.loss == first.loss
        assert again.summary() == first.summary() and again.model == first.model
        assert first.loss.prediction == "v_prediction"  # type: ignore[union-attr]


def test_an_estimate_starts_where_people_begin(folder: Path) -> None:
    model = str(folder)
    found = autofit.estimate(model, gpu="rtx-4090", set={"lora_rank": 4}, resolution=64, seq_len=8)
    config = found.config
    assert (config["precision"], config["micro_batch_size"]) == ("bf16", 1)
    assert config["activation_checkpointing"] == "full"
    assert found.verdict == "yes"


def test_videos_have_frames(tmp_path: Path) -> None:
    model = str(write_pipeline(tmp_path / "wan", "wan"))
    workload = resolve(model, resolution="48x32", frames=9)
    assert workload.batch(2)["latents"].shape == (2, 16, 3, 4, 6)
    again = workload_from_source(workload.source, workload.summary())
    assert again.batch == workload.batch


def test_an_sdxl_is_told_the_sizes_of_its_pictures(tmp_path: Path) -> None:
    model = str(write_pipeline(tmp_path / "sdxl", "sdxl"))
    batch = resolve(model, resolution="96x64").batch(2)
    assert batch["time_ids"].tolist() == [[64, 96, 0, 0, 64, 96]] * 2
    assert batch["pooled_projections"].shape == (2, 32)


def test_timesteps_of_flow_matching_are_shifted_towards_noise() -> None:
    plain, shifted = (
        timesteps(1000, torch.Generator().manual_seed(0), True, shift, 1000) for shift in (1.0, 3.0)
    )
    assert plain.min() > 0 and shifted.max() < 1000
    torch.testing.assert_close(shifted, 3000 * plain / (1000 + 2 * plain))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resolution": "big"}, r"the resolution must be pixels \(1024\) or WIDTHxHEIGHT"),
        ({"resolution": 0}, "the resolution must be pixels"),
        ({"resolution": 100}, "multiples of 16 pixels, not 100x100. For example 96x96"),
        ({"frames": 5}, "makes pictures, which have no frames"),
        ({"sequence_length": 0}, "the tokens of a prompt must be a positive whole number"),
        ({"task": "causal-lm"}, "is trained for diffusion alone, not causal-lm"),
        ({"loss_options": {"beta": 1}}, "unknown option of the loss 'beta'"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(InputError, match=words):
        resolve(str(folder), **options)


@pytest.mark.parametrize("frames", [0, 6])
def test_frames_that_latents_cannot_have(frames: int) -> None:
    with pytest.raises(InputError, match="frames"):
        resolve("wan-1.3b", frames=frames)


def test_other_models_have_no_pictures() -> None:
    with pytest.raises(InputError, match="gpt2 makes no pictures, which alone have resolution"):
        resolve("gpt2", resolution=512)
    with pytest.raises(InputError, match="no model of for diffusion"):
        resolve("gpt2", task="diffusion")
    with pytest.raises(InputError, match="flux-dev is a pipeline of diffusers, which teaches no"):
        resolve("gpt2", task="distill", teacher="flux-dev")


def changed(path: Path, **keys: Any) -> None:
    """Write other values of keys into a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | keys), encoding="utf-8")


def test_files_that_are_wrong_are_named(folder: Path) -> None:
    config = folder / "transformer" / "config.json"
    changed(config, num_layers="three")
    with pytest.raises(InputError, match="pictures cannot be built from its config"):
        resolve(str(folder)).model()
    changed(config, _class_name="AuraFlowTransformer2DModel")
    with pytest.raises(InputError, match="'AuraFlowTransformer2DModel', which autofit cannot ask"):
        resolve(str(folder))
    config.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"transformer/config\.json holds no valid JSON"):
        resolve(str(folder))
    config.unlink()
    with pytest.raises(InputError, match=r"transformer/config\.json is not there"):
        resolve(str(folder))
    changed(folder / "model_index.json", transformer=None)
    with pytest.raises(InputError, match="names no denoiser"):
        resolve(str(folder))


def test_a_schedule_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "sd", "sd")
    scheduler = folder / "scheduler" / "scheduler_config.json"
    changed(scheduler, rescale_betas_zero_snr=True)
    with pytest.raises(InputError, match="not added by a schedule that is known"):
        resolve(str(folder))
    scheduler.write_text('{"_class_name": "DDPMScheduler"}', encoding="utf-8")
    with pytest.raises(InputError, match="the config of the scheduler lacks prediction_type"):
        resolve(str(folder))
