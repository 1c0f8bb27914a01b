"""Sessions of several ranks: checkpoints that any number of them reads, what is saved, evaluated and interrupted."""

import functools
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.layout import fitted_to
from autofit.core.workload import Hyperparameters
from autofit.setup.sharding import NEW_ENOUGH
from autofit.training import sharded_state
from autofit.training.checkpoint_policy import CheckpointPolicy
from autofit.training.evaluation import EvaluationPlan
from autofit.training.loop import STOP, StepReport
from autofit.training.session import METRICS_FILE, Session
from autofit.training.workload import training_workload
from tests.ranks import on_ranks
from tests.tiny import llama_workload
from tests.tolerances import LOSS, assert_trained_alike
from tests.training.test_checkpoint_schema import resign

BATCH, STEPS, MIDDLE = 12, 5, 3
LR = 1e-2
FSDP = {"data_parallel": "fsdp", "micro_batch_size": 2}
DDP = {"data_parallel": "ddp", "micro_batch_size": 2}
PIPELINE = {"pipeline_parallel": 2, "micro_batch_size": 2}
# As many as before are those of a killed rank and of a damaged part.
WORLDS = {"fsdp": (1, 3), "ddp": (1,), "pipeline": (1, 4)}
Answer = tuple[list[float], list[float], list[str]]


def batches() -> list[Any]:
    torch.manual_seed(0)
    return [llama_workload(BATCH).batch(BATCH) for _ in range(STEPS)]


def session(
    knobs: Mapping[str, Any],
    folder: Path | None = None,
    steps: int = STEPS,
    at_step: Callable[[StepReport], object] = lambda _: None,
    evaluating: bool = False,
    every: int = 1,
) -> Answer:
    """Train that many steps in all, from a checkpoint where there is one; the losses, evaluations and notes."""
    workload = replace(
        llama_workload(BATCH), batch=lambda n: {k: v[:n] for k, v in batches()[0].items()}
    )
    torch.manual_seed(7)
    resume = folder is not None and (folder / "checkpoints").exists()
    notes: list[str] = []
    world = dist.get_world_size()
    run = Session(
        workload,
        workload.model(),
        Hyperparameters(lr=LR, max_grad_norm=1.0),
        CheckpointPolicy(folder, resume, checkpoint_every=every),
        (at_step,),
        notes.append,
    )
    given = {"steps": steps, "evaluation": EvaluationPlan(batches()[:2]) if evaluating else None}
    reports, evaluations = run.run(fitted_to(knobs, world, BATCH), "cpu", batches(), **given)
    return [each.loss for each in reports], evaluations, notes


@pytest.fixture(scope="module")
def whole() -> list[float]:
    """The losses of one device."""
    ((losses, _, _),) = on_ranks(1, session, {"micro_batch_size": 2})
    return losses


@pytest.mark.parametrize(("kind", "knobs"), [("fsdp", FSDP), ("ddp", DDP), ("pipeline", PIPELINE)])
def test_a_run_goes_on_with_any_number_of_ranks(
    kind: str, knobs: dict[str, Any], whole: list[float], tmp_path: Path
) -> None:
    for losses, _, _ in on_ranks(2, session, knobs, tmp_path / "2", MIDDLE):
        assert losses == pytest.approx(whole[:MIDDLE], abs=LOSS)
    for world in WORLDS[kind]:
        folder = shutil.copytree(tmp_path / "2", tmp_path / f"2-{world}")
        for losses, _, notes in on_ranks(world, session, knobs, folder):
            assert losses == pytest.approx(whole, abs=LOSS)
            assert not [note for note in notes if "damaged" in note]


def test_a_run_of_split_layers_goes_on_with_fewer_ranks(whole: list[float], tmp_path: Path) -> None:
    knobs = FSDP | {"tensor_parallel": 2}
    for losses, _, _ in on_ranks(4, session, knobs, tmp_path, MIDDLE):
        assert losses == pytest.approx(whole[:MIDDLE], abs=LOSS)
    for losses, _, notes in on_ranks(2, session, knobs, tmp_path):
        assert losses == pytest.approx(whole, abs=LOSS)
        assert not [note for note in notes if "damaged" in note]


@pytest.mark.parametrize("knobs", [FSDP, PIPELINE], ids=["fsdp", "pipeline"])
def test_a_run_of_one_device_goes_on_with_two(
    knobs: dict[str, Any], whole: list[float], tmp_path: Path
) -> None:
    on_ranks(1, session, {"micro_batch_size": 2}, tmp_path, MIDDLE)
    for losses, _, _ in on_ranks(2, session, knobs, tmp_path):
        assert losses == pytest.approx(whole, abs=LOSS)


def mortal(knobs: Mapping[str, Any], folder: Path) -> Answer:
    """A session whose rank 1 is killed when the checkpoint of its third step is being written."""
    write, calls = sharded_state.write, [0]

    def deadly(tensors: dict[str, torch.Tensor], part: Path) -> list[Path]:
        calls[0] += 1
        if calls[0] == MIDDLE and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(tensors, part)

    sharded_state.write = deadly
    return session(knobs, folder)


def test_a_killed_rank_leaves_a_whole_checkpoint_and_the_run_goes_on_to_the_bit(
    tmp_path: Path,
) -> None:
    expected, _, _ = on_ranks(2, session, FSDP)[0]
    with pytest.raises(AssertionError, match="rank 1: the process ended without an answer"):
        on_ranks(2, mortal, FSDP, tmp_path)
    assert (tmp_path / "checkpoints" / f"step-{MIDDLE - 1:08d}").is_dir()
    for losses, _, _ in on_ranks(2, session, FSDP, tmp_path):
        assert losses == expected
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000005",
    ]


def flipped(path: Path) -> None:
    (part,) = path.glob("shard-00002-*")
    part.write_bytes(part.read_bytes()[:-1] + b"x")


def without_sense(path: Path) -> None:
    """A signed state of the optimizer whose second moment has another name."""
    (part,) = path.glob("shard-00002-*")
    with safetensors.safe_open(part, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = next(name for name in tensors if name.endswith("/exp_avg_sq"))
    other = name.replace("exp_avg_sq", "exp_avg_no")
    tensors[other] = tensors.pop(name)
    metadata = {key: text.replace(name, other) for key, text in metadata.items()}
    safetensors.torch.save_file(tensors, part, metadata)
    resign(path, part.name)


@pytest.mark.parametrize("damage", [flipped, without_sense])
def test_a_damaged_part_sends_all_back_to_the_checkpoint_before(
    whole: list[float], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    on_ranks(2, session, FSDP, tmp_path, MIDDLE)
    damage(tmp_path / "checkpoints" / f"step-{MIDDLE:08d}")
    for losses, _, notes in on_ranks(2, session, FSDP, tmp_path):
        assert losses == pytest.approx(whole, abs=LOSS)
        assert "the checkpoint of step 3 is damaged" in notes[-1]


def test_state_of_own_parts_goes_on_with_as_many_ranks_only(tmp_path: Path) -> None:
    knobs = FSDP | {"optimizer": "adamw-8bit"}
    expected, _, _ = on_ranks(2, session, knobs)[0]
    on_ranks(2, session, knobs, tmp_path, MIDDLE)
    with pytest.raises(
        AssertionError, match=r"adamw-8bit was written on 2 devices, .* Resume on 2 devices\."
    ):
        on_ranks(3, session, knobs, tmp_path)
    assert [losses for losses, _, _ in on_ranks(2, session, knobs, tmp_path)] == [expected] * 2


QLORA = {"lora_rank": 2, "quantization": "nf4" if NEW_ENOUGH else "none"}


@pytest.mark.parametrize(
    ("knobs", "more"),
    [(FSDP, {}), (FSDP, QLORA), (PIPELINE, {}), (PIPELINE, QLORA)],
    ids=["full", "adapters", "full, pipeline", "adapters, pipeline"],
)
def test_what_is_saved_is_what_one_device_saves(
    knobs: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(1, session, {"micro_batch_size": 2} | more, tmp_path / "1")
    on_ranks(2, session, knobs | more, tmp_path / "2")
    files = (next((tmp_path / each / "model").glob("*.safetensors")) for each in "12")
    expected, found = map(safetensors.torch.load_file, files)
    assert found.keys() == expected.keys()
    assert_trained_alike(found, expected, lr=LR)
    first, second = (
        {each.name for each in (tmp_path / folder / "model").iterdir()} for folder in "12"
    )
    assert first == second
    lines = (tmp_path / "2" / METRICS_FILE).read_text().splitlines()
    assert len(lines) == STEPS, "one rank writes them"


def ignored(_: StepReport) -> None:
    """Listens to nothing."""


EVALUATING = (None, STEPS, ignored, True)


@functools.cache
def evaluated_alone() -> list[float]:
    """The evaluations of one device."""
    ((_, expected, _),) = on_ranks(1, session, {"micro_batch_size": 2}, *EVALUATING)
    return expected


@pytest.mark.parametrize(("world", "knobs"), [(3, FSDP), (2, PIPELINE)])
def test_evaluations_are_those_of_one_device(world: int, knobs: dict[str, Any]) -> None:
    expected = evaluated_alone()
    for _, found, _ in on_ranks(world, session, knobs, *EVALUATING):
        assert found == pytest.approx(expected, abs=LOSS)


def interrupted(report: StepReport) -> None:
    if report.step == 1:  # after whose loss was added up, so that all agree on it with the next one
        os.kill(os.getpid(), signal.SIGINT)


def stopped(knobs: Mapping[str, Any], folder: Path) -> str:
    # whoever started the tests may ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        session(knobs, folder, STEPS, interrupted)  # a callback, and so on the first rank only
    except KeyboardInterrupt:
        return "stopped"
    return "went on"


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    whole: list[float], tmp_path: Path
) -> None:
    assert on_ranks(2, stopped, FSDP, tmp_path) == ["stopped"] * 2
    for losses, _, _ in on_ranks(2, session, FSDP, tmp_path):
        assert losses == pytest.approx(whole, abs=LOSS)


def waits(folder: Path) -> list[int]:
    """How often the first rank has waited for the other after each step, but for what fsdp exchanges."""
    found: list[int] = []
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
    ):
        session(
            FSDP,
            folder,
            at_step=lambda _: found.append(gathered.call_count + reduced.call_count),
            every=100,
        )
    return found


def test_ranks_wait_for_one_another_three_times_a_step_and_once_for_callbacks(
    tmp_path: Path,
) -> None:
    """For the labels of a step, its loss and the norm of its gradients: each time costs about 1 % of 200 ms. Where
    there are callbacks, also for whether one ends training."""
    first, second, *_ = on_ranks(2, waits, tmp_path)[0]
    assert second - first == 4


def ended_after_two(report: StepReport) -> object:
    return STOP if report.step == 2 else None


def test_a_callback_of_the_first_rank_ends_training_on_all(
    whole: list[float], tmp_path: Path
) -> None:
    answers = on_ranks(2, session, FSDP, tmp_path, STEPS, ended_after_two, True, 100)
    for losses, evaluations, _ in answers:
        assert losses == pytest.approx(whole[:2], abs=LOSS)
        assert len(evaluations) == 1
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert (tmp_path / "model" / "model.safetensors").exists()


def counted_session(
    folder: Path, size: int, steps: int, epochs: int | None = None
) -> tuple[list[float], list[str]]:
    """Train on 24 numbered samples, read by each rank alone, in batches of a size; the losses and notes."""
    numbers = torch.arange(24.0)
    data = DataLoader(TensorDataset(numbers.view(-1, 1), numbers.view(-1, 1)), batch_size=size)
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        return (output - output.detach() + batch[1]).mean()  # the mean of the numbers that are seen

    workload = training_workload(model, data, loss)
    resume = (folder / "checkpoints").exists()
    notes: list[str] = []
    policy = CheckpointPolicy(folder, resume, checkpoint_every=1)
    run = Session(workload, model, Hyperparameters(lr=1e-3), policy, (), notes.append)
    config = fitted_to(DDP, dist.get_world_size(), size)
    reports, _ = run.run(config, "cpu", data, steps=steps, epochs=epochs)
    return [each.loss for each in reports], notes


def test_ranks_go_on_at_the_same_sample_with_another_batch_size(tmp_path: Path) -> None:
    on_ranks(2, counted_session, tmp_path, 4, MIDDLE)
    for losses, _ in on_ranks(2, counted_session, tmp_path, 8, 3, 1):
        # before it three batches of 4; the means of 12 to 15, which were left of a batch, and of 16 to 23
        assert losses == [1.5, 5.5, 9.5, 13.5, 19.5]
