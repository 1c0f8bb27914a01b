"""How files divide a training over devices is read as people write it, or refused in a sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.export.importers import importer_of
from autofit.export.importers.accelerate import read_launcher
from autofit.export.importers.deepspeed import Zero, division_by, read_zero
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.importers.importer import can_become, changes, config_of
from tests.export.importers.test_importers import CHOICES, named
from tests.export.sources import FSDP

AXOLOTL: dict[str, Any] = {"base_model": "some/model", "bf16": "auto"}
TRL: dict[str, Any] = {"model_name_or_path": "some/model"}
LLAMA_FACTORY: dict[str, Any] = {"model_name_or_path": "some/model", "finetuning_type": "full"}
NOWHERE = Path("nowhere")
BOTH = ("reshard_after_forward", "fsdp_offload")


def division_of(tree: dict[str, Any], folder: Path = NOWHERE) -> Division:
    keys = flat(tree)
    return importer_of(keys, "file.yaml").divide(keys, folder)


def fsdp(**knobs: Any) -> dict[str, Any]:
    usual = {"reshard_after_forward": True, "fsdp_offload": "none"}
    return {"data_parallel": "fsdp", **usual, **knobs}


FIRST = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}}
SECOND = {
    "fsdp_version": 2,
    "fsdp_config": {"offload_params": False, "reshard_after_forward": True},
}


@pytest.mark.parametrize(
    ("tree", "knobs", "may_change"),
    [
        ({**AXOLOTL, **FIRST}, fsdp(fsdp_offload="cpu"), BOTH[1:]),
        ({**AXOLOTL, **FIRST, "optimizer": "adamw_8bit"}, fsdp(fsdp_offload="cpu"), ()),
        (
            {**AXOLOTL, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}},
            fsdp(reshard_after_forward=False),
            BOTH,
        ),
        (
            {**AXOLOTL, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
            fsdp(fsdp_offload="cpu"),
            BOTH,
        ),
        ({**AXOLOTL, "fsdp": ["shard_grad_op"]}, fsdp(reshard_after_forward=False), BOTH[1:]),
        ({**AXOLOTL, "fsdp": ["no_shard"]}, {"data_parallel": "ddp"}, ()),
        ({**AXOLOTL}, {}, ("data_parallel",)),
        ({**AXOLOTL, "ddp": True}, {}, ()),
        ({**AXOLOTL, "fsdp": [], "fsdp_config": {}, "deepspeed": None}, {}, ("data_parallel",)),
        ({**TRL, "fsdp": "full_shard auto_wrap"}, fsdp(), BOTH),
        ({**TRL, "fsdp": "full_shard offload"}, fsdp(fsdp_offload="cpu"), BOTH[:1]),
        ({**TRL, "fsdp": True, "fsdp_config": {"version": 1}}, fsdp(), BOTH[1:]),
        ({**TRL, "fsdp_config": {"version": 2}}, {}, ()),
        ({**TRL, "accelerate_config": "fsdp2"}, fsdp(), ()),
        ({**TRL, "accelerate_config": "zero2"}, fsdp(reshard_after_forward=False), ()),
        ({**TRL, "accelerate_config": "multi_gpu", "num_processes": 2}, {}, ()),
        (
            {**LLAMA_FACTORY, "fsdp": ["full_shard"], "fsdp_config": {"cpu_offload": True}},
            fsdp(fsdp_offload="cpu"),
            BOTH,
        ),
        ({**LLAMA_FACTORY, "deepspeed": "examples/deepspeed/ds_z3_config.json"}, fsdp(), ()),
    ],
)
def test_files_are_read_as_people_write_them(
    tree: dict[str, Any], knobs: dict[str, Any], may_change: tuple[str, ...]
) -> None:
    found = division_of(tree)
    assert found.knobs == knobs
    assert found.open == may_change


@pytest.mark.parametrize(
    ("value", "zero"),
    [
        ("deepspeed_configs/zero1.json", Zero(1, has_large_buckets=True)),
        ("deepspeed_configs/zero1_torch_compile.json", Zero(1, has_large_buckets=True)),
        ("deepspeed_configs/zero2.json", Zero(2, offloads_optimizer=True, has_large_buckets=True)),
        ("deepspeed_configs/zero3.json", Zero(3)),
        ("deepspeed_configs/zero3_bf16.json", Zero(3)),
        ("deepspeed_configs/zero3_bf16_cpuoffload_params.json", Zero(3, offloads_weights=True)),
        ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", Zero(3, True, True)),
        ("examples/deepspeed/ds_z0_config.json", Zero(0, has_large_buckets=True)),
        ("examples/deepspeed/ds_z2_config.json", Zero(2, has_large_buckets=True)),
        ("ds_z2_offload_config.json", Zero(2, offloads_optimizer=True, has_large_buckets=True)),
        ("ds_z3_offload_config.json", Zero(3, True, True)),
        ("zero0", Zero(0, has_large_buckets=True)),
        ("zero2", Zero(2, has_large_buckets=True)),
        ("zero2_offload", Zero(2, offloads_optimizer=True, has_large_buckets=True)),
        ("zero3_offload", Zero(3, True, True)),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, Zero(3)),
        ({"bf16": {"enabled": True}}, Zero(0, has_large_buckets=True)),
    ],
)
def test_settings_of_deepspeed_are_known_by_their_published_names(value: Any, zero: Zero) -> None:
    assert read_zero(value, NOWHERE) == zero


def test_settings_beside_the_file_count_before_their_name(tmp_path: Path) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
            "reduce_bucket_size": 5e8,
        },
    }
    (tmp_path / "zero3.json").write_text(json.dumps(settings))
    found = read_zero("zero3.json", tmp_path)
    assert found == Zero(2, offloads_optimizer=True, has_sizes=True, has_large_buckets=True)
    assert division_of({**AXOLOTL, "deepspeed": "zero3.json"}, tmp_path) == division_by(found)
    assert "micro_batch_size" in division_by(found).holds
    assert division_of({**AXOLOTL, "deepspeed": settings}) == division_by(found)


def test_what_is_predicted_in_place_of_deepspeed_is_told() -> None:
    whole, state, gradients, weights = (division_by(Zero(stage)) for stage in range(4))
    assert whole.knobs == state.knobs == {"data_parallel": "ddp"}
    assert "needs less memory than predicted" in state.notes[0]
    assert gradients.knobs["reshard_after_forward"] is False
    assert "keeps whole weights" in gradients.notes[0]
    assert weights.notes == ("ZeRO-3 is predicted as FSDP.",)
    assert "1 to 2 GB on top" in division_by(Zero(2, has_large_buckets=True)).notes[0]
    assert division_by(Zero(3, offloads_optimizer=True)).knobs["fsdp_offload"] == "cpu"
    assert "needs less" in division_by(Zero(3, offloads_weights=True)).notes[1]
    assert not any(each.open for each in (whole, state, gradients, weights))


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({**AXOLOTL, "deepspeed": "mine.json"}, "is not beside the file"),
        ({**AXOLOTL, "deepspeed": "ds_z2_autotp_config.json"}, "no published name"),
        ({**AXOLOTL, "deepspeed": 3}, "neither a path, a name nor a mapping"),
        ({**AXOLOTL, "deepspeed": "x" * 5000 + ".json"}, "is not beside the file"),
        ({**AXOLOTL, "deepspeed": {"zero_optimization": {"stage": 7}}}, "must be 0, 1, 2 or 3"),
        ({**AXOLOTL, "deepspeed": {"zero_optimization": 3}}, "values by name"),
        (
            {**AXOLOTL, "deepspeed": {"zero_optimization": {"offload_param": {"device": "nvme"}}}},
            "offloading to 'nvme' is not predicted",
        ),
        ({**AXOLOTL, **SECOND, "deepspeed": "zero3"}, "both deepspeed and fsdp"),
        ({**AXOLOTL, "fsdp_version": 3, "fsdp": ["full_shard"]}, "must be 1 or 2, not 3"),
        ({**AXOLOTL, "fsdp": ["half_shard"]}, "fsdp: 'half_shard' is not known"),
        ({**TRL, "fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, "all gathered"),
        ({**TRL, "fsdp": True, "fsdp_config": "fsdp.json"}, "fsdp.json cannot be read as JSON"),
        ({**TRL, "fsdp": True, "fsdp_config": {"reshard_after_forward": "x"}}, "is not known"),
        ({**TRL, "accelerate_config": "mine.yaml"}, "by mine.yaml, which is not there"),
        ({**AXOLOTL, "tensor_parallel_size": 2}, "without FSDP or ZeRO-3 it is not predicted"),
        ({**AXOLOTL, **SECOND, "dp_shard_size": "x"}, "dp_shard_size must be a whole number"),
    ],
)
def test_what_cannot_be_predicted_is_told_in_a_sentence(tree: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        division_of(tree)
    assert "\n" not in str(caught.value)


def test_degrees_make_the_number_of_devices() -> None:
    sizes = {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2}
    found = division_of({**AXOLOTL, **SECOND, **sizes})
    assert found.devices == 16
    assert found.knobs["data_parallel_replicate"] == found.knobs["tensor_parallel"] == 2
    assert division_of({**AXOLOTL, **SECOND, "tensor_parallel_size": 2}).devices is None
    assert division_of({**TRL, "accelerate_config": "zero3", "num_processes": 2}).devices == 2


def test_a_file_for_accelerate_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 4\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
        "parallelism_config:\n  parallelism_config_cp_size: 2\n"
    )
    found = read_launcher(path.name, tmp_path)
    assert found.knobs == fsdp(fsdp_offload="cpu", context_parallel=2)
    assert (found.devices, found.open) == (4, ())
    assert division_of({**TRL, "accelerate_config": "fsdp.yaml"}, tmp_path) == found

    path.write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
        "  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
    )
    assert read_launcher(path.name, tmp_path).knobs == fsdp(fsdp_offload="cpu")


def test_what_a_file_for_accelerate_says_of_a_step_holds(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_activation_checkpointing: true\n"
    )
    sharded = read_launcher(path.name, tmp_path)
    # its blocks are checkpointed, whatever the tool's own key says
    assert sharded.knobs == fsdp(activation_checkpointing="full")
    assert "activation_checkpointing" in sharded.holds

    path.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 8\n"
        "deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 16\n"
    )
    machines = read_launcher(path.name, tmp_path)
    assert (machines.devices, machines.nodes) == (4, 2)
    # DeepSpeed demands the accumulation that the file names
    assert {"micro_batch_size", "gradient_accumulation_steps"} <= set(machines.holds)

    with pytest.raises(InputError, match=r"by fsdp2.json, which is not there"):
        read_launcher("fsdp2.json", tmp_path)


def test_a_file_for_accelerate_may_be_named_from_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "two.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 2\n"
    )
    monkeypatch.chdir(tmp_path)
    assert read_launcher("configs/two.yaml", tmp_path / "scripts").devices == 2


def test_a_script_of_trl_is_divided_as_it_is_launched(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n"
        "fsdp_config:\n  fsdp_version: 2\n"
    )
    keys = {**TRL, "launcher.command": "trl dpo", "launcher.config_file": "fsdp.yaml"}
    found = division_of(keys, tmp_path)
    assert (found.knobs, found.devices, found.nodes) == (fsdp(), 4, 2)
    fewer = division_of({**keys, "launcher.num_processes": 4}, tmp_path)
    assert (fewer.devices, fewer.nodes) == (2, 2)

    alone = {**TRL, "launcher.command": "trl dpo", "launcher.nproc_per_node": 2}
    assert (division_of(alone).devices, division_of(alone).nodes) == (2, 1)
    with pytest.raises(InputError, match="accelerate launch --use_fsdp"):
        division_of({**alone, "launcher.use_fsdp": True})


def test_options_of_fsdp_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"fsdp_reshard_after_forward": false}')
    found = division_of({**TRL, "fsdp": True, "fsdp_config": "fsdp.json"}, tmp_path)
    assert found.knobs == fsdp(reshard_after_forward=False)
    assert not found.open


def test_trained_weights_are_wide_where_they_are_divided() -> None:
    keys = flat({**AXOLOTL, **SECOND})
    importer = importer_of(keys, "file.yaml")
    read = config_of(importer, keys, named(), CHOICES, importer.divide(keys, NOWHERE))
    assert read.precision == "bf16-mixed"
    pure = {**TRL, "dtype": "bfloat16", "bf16": False, "fsdp": True}
    importer = importer_of(pure, "file.yaml")
    read = config_of(importer, pure, named(), CHOICES, importer.divide(pure, NOWHERE))
    assert read.precision == "bf16"


@pytest.mark.parametrize(
    ("tree", "written"),
    [
        (
            {**AXOLOTL, "fsdp_version": 2, "fsdp_config": {"fsdp_offload_params": False}},
            {"fsdp_config.fsdp_offload_params", "fsdp_config.reshard_after_forward"},
        ),
        (
            {**AXOLOTL, **SECOND},
            {"fsdp_config.offload_params", "fsdp_config.reshard_after_forward"},
        ),
        (
            {**TRL, "fsdp": "full_shard"},
            {"fsdp_config.cpu_offload", "fsdp_config.reshard_after_forward"},
        ),
        (
            {**TRL, "fsdp": True, "fsdp_config": {"offload_params": False}},
            {"fsdp_config.offload_params", "fsdp_config.reshard_after_forward"},
        ),
    ],
)
def test_what_changes_is_written_by_the_names_of_the_file(
    tree: dict[str, Any], written: set[str]
) -> None:
    keys = flat(tree)
    importer = importer_of(keys, "file.yaml")
    before = named(**FSDP, precision="bf16")
    assert changes(importer, keys, before, before, BOTH) == {}

    other = before.config.replace(reshard_after_forward=False, fsdp_offload="cpu")
    after = replace(before, config=other)
    assert set(changes(importer, keys, before, after, BOTH)) == written
    for knob in BOTH:
        assert can_become(importer, before, knob, other[knob])


def test_checkpointing_by_fsdp_is_changed_by_its_own_key() -> None:
    config = {"reshard_after_forward": True, "activation_checkpointing": True}
    keys = flat(
        {**AXOLOTL, "gradient_checkpointing": False, "fsdp_version": 2, "fsdp_config": config}
    )
    importer = importer_of(keys, "file.yaml")
    division = importer.divide(keys, NOWHERE)
    assert division.only == {"activation_checkpointing": ("full", "none")}
    before = named(**FSDP, precision="bf16-mixed", activation_checkpointing="full")
    read = config_of(importer, keys, named(), CHOICES, division)
    assert read.activation_checkpointing == "full"

    after = replace(before, config=before.config.replace(activation_checkpointing="none"))
    changed = changes(importer, keys, before, after, ["activation_checkpointing"])
    assert changed == {"fsdp_config.activation_checkpointing": False}
