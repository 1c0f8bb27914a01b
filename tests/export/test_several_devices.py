"""Configs of several devices for every tool: their keys, what is noted instead, and the command that starts them."""

import json
from typing import Any

import pytest
import yaml

from autofit.core.errors import InputError
from autofit.export.tool import Export, write
from autofit.export.tools import all_tools, tool_named
from tests.export.sources import (
    CONTEXT,
    DDP,
    FSDP,
    HSDP,
    LORA,
    NODES,
    OF_PICTURES,
    TENSOR,
    ZERO_2,
    for_tool,
    source,
)

TOOLS = [tool.name for tool in all_tools()]
GROUPS = FSDP | {"reshard_after_forward": 2}
OFFLOADED = FSDP | {"fsdp_offload": "cpu"}
# Which of the kinds a tool deviates from, by the knob that it names; the others have keys.
NOTED: dict[str, dict[str, str]] = {
    "accelerate": {"groups": "reshard_after_forward"},
    "axolotl": {"groups": "reshard_after_forward"},
    "deepspeed": {
        **dict.fromkeys(("ddp", "fsdp", "zero-2", "groups", "offloaded"), "data_parallel"),
        "hsdp": "data_parallel data_parallel_replicate",
    },
    "lightning": {
        **dict.fromkeys(("fsdp", "zero-2", "hsdp", "offloaded"), "data_parallel"),
        "groups": "data_parallel reshard_after_forward",
    },
    "litgpt": {
        "ddp": "data_parallel",
        "zero-2": "reshard_after_forward",
        "hsdp": "data_parallel_replicate",
        "groups": "reshard_after_forward",
        "offloaded": "fsdp_offload",
    },
    "llamafactory": {"groups": "reshard_after_forward"},
    "msswift": {"hsdp": "data_parallel_replicate", "groups": "reshard_after_forward"},
    "torchtitan": {"groups": "reshard_after_forward"},
    "torchtune": {
        "ddp": "data_parallel",
        "hsdp": "data_parallel_replicate",
        "groups": "reshard_after_forward",
    },
    "transformers": {"groups": "reshard_after_forward"},
    "trl": {"groups": "reshard_after_forward"},
}
KINDS = {
    "ddp": DDP,
    "fsdp": FSDP,
    "zero-2": ZERO_2,
    "hsdp": HSDP,
    "groups": GROUPS,
    "offloaded": OFFLOADED,
}
ON_ONE = ("sentencetransformers", "ludwig", "unsloth", "peft", *OF_PICTURES)


def exported(name: str, nodes: bool = False, **knobs: Any) -> Export:
    return write(
        tool_named(name), for_tool(name, others=NODES if nodes else None, **{**LORA, **knobs})
    )


def held(name: str, **knobs: Any) -> Any:
    """The keys of the last file."""
    return yaml.safe_load(list(exported(name, **knobs).files.values())[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOOLS)
def test_what_a_tool_cannot_divide_is_noted_and_no_more(name: str, kind: str) -> None:
    notes = {each.knob for each in exported(name, **KINDS[kind]).departures if each.knob in FSDP}
    noted = "data_parallel" if name in ON_ONE else NOTED[name].get(kind, "")
    own = {"gradient_accumulation_steps"} if name in ("accelerate", "lightning", "peft") else set()
    assert notes - own == set(noted.split())


@pytest.mark.parametrize("name", TOOLS)
def test_every_file_says_on_how_many_devices(name: str) -> None:
    for file, text in exported(name, nodes=True, **FSDP).files.items():
        if not file.endswith(("_accelerate.yaml", "adapter_config.json")):
            assert "on 4 x NVIDIA H200, within 24 GiB each" in text, file


RENDEZVOUS = "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500"
NODE = "--machine_rank NODE --main_process_ip FIRST_NODE --main_process_port 29500"
COMMANDS = {  # on one machine, and on each of two
    "accelerate": (
        "accelerate launch --config_file accelerate.yaml YOUR",
        f"accelerate.yaml {NODE} YOUR_SCRIPT.py",
    ),
    "axolotl": ("--launcher torchrun -- --nproc_per_node=4\n", f"--nproc_per_node=2 {RENDEZVOUS}"),
    "llamafactory": (
        "--config_file llamafactory_accelerate.yaml -m llamafactory.launcher llamafactory.yaml",
        NODE,
    ),
    "torchtune": (
        "tune run --nproc_per_node 4 {full,lora}_finetune_distributed",
        f"--nproc_per_node 2 {RENDEZVOUS}",
    ),
    "trl": ("trl sft --config trl.yaml --accelerate_config trl_accelerate.yaml", NODE),
    "torchtitan": (
        "torchrun --nproc-per-node 4 -m torchtitan.train",
        "torchrun --nproc-per-node 2 $NODES -m torcht",
    ),
    "transformers": (
        "torchrun --nproc-per-node 4 train_transformers.py",
        '"--nnodes 2 --rdzv-backend c10d --rdzv-end',
    ),
    "lightning": (
        "torchrun --nproc-per-node 4 YOUR_CLI.py fit",
        "torchrun --nproc-per-node 2 $NODES YOUR_CLI.py",
    ),
    "litgpt": ("litgpt {finetune_full,finetune_lora} --config litgpt.yaml", "--config litgpt.yaml"),
    "deepspeed": (
        "torchrun --nproc-per-node 4 YOUR_SCRIPT.py",
        "torchrun --nproc-per-node 2 $NODES YOUR_SCRIPT.py",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_header_says_how_processes_are_started(name: str) -> None:
    for nodes, command in zip((False, True), COMMANDS[name], strict=True):
        assert command in next(iter(exported(name, nodes, **FSDP).files.values())).replace(
            '\\"', '"'
        )


def test_accelerate_and_what_it_launches() -> None:
    assert held("accelerate", **DDP)["distributed_type"] == "MULTI_GPU"
    assert held("trl", **OFFLOADED)["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
    }
    groups = held("llamafactory", **HSDP)["parallelism_config"]
    assert (
        groups["parallelism_config_dp_replicate_size"],
        groups["parallelism_config_dp_shard_size"],
    ) == (2, 2)
    assert list(exported("trl").files) == ["trl.yaml"]


def test_gradients_in_16_bits_are_noted() -> None:
    for name in ("accelerate", "transformers", "trl", "llamafactory", "axolotl"):
        notes = [str(each) for each in exported(name, **FSDP, precision="bf16-mixed").departures]
        assert any(
            "averages gradients in 16 bits, which were measured in float32" in each
            for each in notes
        ), name


def test_on_a_cpu_accelerate_divides_nothing() -> None:
    for name in ("accelerate", "transformers", "trl", "llamafactory"):
        made = write(tool_named(name), source("cpu", **HSDP))
        (note,) = (each for each in made.departures if each.knob == "data_parallel")
        assert "divides no weights on a CPU" in note.instead
        assert "arallelism_config" not in made.text
        assert "PARALLELISM_CONFIG" not in made.text
        assert ("distributed_type: MULTI_GPU" in made.text) == (name != "transformers")
        assert ("ACCELERATE_USE_CPU=true accelerate launch" in made.text) == (name == "accelerate")


def test_deepspeed_has_the_stage_of_each_kind() -> None:
    def zero(**knobs: Any) -> Any:
        knobs = {"precision": "fp32", **knobs}
        return json.loads(exported("deepspeed", **knobs).files["deepspeed.json"])[
            "zero_optimization"
        ]

    assert [zero(**kind)["stage"] for kind in (DDP, ZERO_2, FSDP)] == [0, 2, 3]
    assert zero(**HSDP)["zero_hpz_partition_size"] == zero(**GROUPS)["zero_hpz_partition_size"] == 2
    offloaded = zero(**OFFLOADED)
    assert (offloaded["offload_optimizer"]["device"], offloaded["offload_param"]["device"]) == (
        "cpu",
        "cpu",
    )
    two = zero(**ZERO_2 | {"fsdp_offload": "cpu"})
    assert (two["offload_optimizer"]["device"], two["offload_param"]["device"]) == ("cpu", "none")


def test_tools_with_words_of_their_own() -> None:
    axolotl = held("axolotl", **HSDP)
    assert (axolotl["fsdp_version"], axolotl["dp_replicate_size"], axolotl["dp_shard_size"]) == (
        2,
        2,
        2,
    )
    assert axolotl["fsdp_config"]["reshard_after_forward"] is True
    titan = exported("torchtitan", **ZERO_2).text
    assert 'data_parallel_shard_degree=4, fsdp_reshard_after_forward="never"' in " ".join(
        titan.split()
    )
    assert "enable_cpu_offload=True" in exported("torchtitan", **OFFLOADED).text
    assert "global_batch_size=8" in titan
    tune = held("torchtune", **OFFLOADED)
    assert (tune["fsdp_cpu_offload"], tune["fsdp_reshard_after_forward"]) == (True, True)
    assert (
        held("litgpt", **FSDP)["devices"],
        held("litgpt", **FSDP)["train"]["global_batch_size"],
    ) == (4, 8)
    trainer = held("lightning", **HSDP)["trainer"]
    assert trainer["strategy"]["init_args"]["sharding_strategy"] == "HYBRID_SHARD"
    assert (trainer["devices"], held("lightning", **DDP)["trainer"]["strategy"]) == (
        4,
        "ddp_find_unused_parameters_true",
    )


def test_transformers_has_groups_in_the_environment() -> None:
    files = exported("transformers", **HSDP).files
    arguments = yaml.safe_load(files["training_arguments.yaml"])
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"]["version"] == 2
    assert (
        'os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "2"' in files["train_transformers.py"]
    )


def test_divided_weights_of_four_bits_are_stored_as_floats() -> None:
    qlora = {"quantization": "nf4", "optimizer": "adamw-8bit", **FSDP}
    assert 'bnb_4bit_quant_storage="bfloat16"' in exported("transformers", **qlora).text
    assert "bnb_4bit_quant_storage: bfloat16" in exported("trl", **qlora).text
    assert "bnb_4bit_quant_storage" not in exported("trl", quantization="nf4").text
    for name in ("transformers", "trl", "axolotl", "llamafactory"):
        made = exported(name, **qlora)
        assert "adamw_torch_8bit" in made.text
        assert any(each.knob == "optimizer" for each in made.departures)


def test_litgpt_neither_quantises_on_several_devices_nor_leaves_blocks_whole() -> None:
    with pytest.raises(InputError, match="litgpt quantises weights on one device only"):
        exported("litgpt", **FSDP, quantization="nf4")
    departed = {each.knob for each in exported("litgpt", **FSDP).departures}
    assert "activation_checkpointing" in departed
    full = exported("litgpt", **FSDP, activation_checkpointing="full")
    assert not full.departures


def test_a_tool_of_one_device_says_what_it_takes_for_the_same_batch() -> None:
    (note,) = (
        each for each in exported("unsloth", **FSDP).departures if each.knob == "data_parallel"
    )
    assert "takes 4 times the gradient_accumulation_steps for the same batch" in note.instead
    assert note.may_not_fit


SPLIT = {  # which tools have keys for it; those of the second have them, and deviate
    "tensor_parallel": (
        TENSOR,
        ("axolotl", "deepspeed", "torchtitan", "torchtune"),
        ("accelerate",),
    ),
    "context_parallel": (CONTEXT, (), ("accelerate", "torchtitan", "transformers", "trl")),
}


@pytest.mark.parametrize("knob", SPLIT)
@pytest.mark.parametrize("name", [name for name in TOOLS if name not in ("peft", *OF_PICTURES)])
def test_what_is_split_is_told_or_runs_on_fewer_devices(name: str, knob: str) -> None:
    knobs, told, deviating = SPLIT[knob]
    made = exported(name, **{"lora_rank": 0, "lora_targets": None, "precision": "bf16", **knobs})
    notes = [each for each in made.departures if each.knob == knob]
    assert bool(notes) == (name not in (*told, *ON_ONE))
    assert bool(made.keys[knob]) == (name in (*told, *deviating))
    if name not in (*told, *deviating, *ON_ONE):
        assert (
            "trains on 2 times fewer devices, each of which holds more than measured"
            in notes[0].instead
        )
        assert notes[0].may_not_fit


def test_processes_are_as_many_as_a_tool_can_use() -> None:
    def processes(name: str, **knobs: Any) -> tuple[int, dict[str, int]]:
        file = held(name, **{"lora_rank": 0, "lora_targets": None, **knobs})
        return file["num_processes"], file.get("parallelism_config", {})

    assert processes("accelerate", **TENSOR)[0] == 4
    assert processes("accelerate", **TENSOR)[1]["parallelism_config_tp_size"] == 2
    assert processes("trl", **TENSOR) == processes("llamafactory", **CONTEXT) == (2, {})
    assert processes("trl", **CONTEXT)[1]["parallelism_config_cp_size"] == 2
    titan = exported("torchtitan", **{"lora_rank": 0, "lora_targets": None, **TENSOR}).text
    assert "tensor_parallel_degree=2, enable_sequence_parallel=False" in " ".join(titan.split())
    assert "torchrun --nproc-per-node 4 -m torchtitan" in titan
    assert "global_batch_size=8" in titan
    layers_alone: dict[str, Any] = {
        "data_parallel": "none",
        "data_parallel_shard": 1,
        "tensor_parallel": 4,
    }
    layers_alone |= {
        "data_parallel_replicate": 1,
        "context_parallel": 1,
        "gradient_accumulation_steps": 2,
    }
    for name in ("trl", "litgpt", "transformers"):
        command = write(tool_named(name), source(**layers_alone, micro_batch_size=4)).text
        assert "torchrun" not in command
        assert "accelerate" not in command


def test_torchtune_splits_layers_by_its_plan_without_the_fused_optimizer() -> None:
    full = {"lora_rank": 0, "lora_targets": None, **TENSOR}
    tune = held("torchtune", **full)
    assert (tune["tensor_parallel_dim"], tune["optimizer"]["fused"]) == (2, False)
    assert (
        tune["tensor_parallel_plan"]["_component_"] == "torchtune.models.llama3.base_llama_tp_plan"
    )
    assert {each.knob for each in exported("torchtune", **full).departures} == {"optimizer"}
    with pytest.raises(InputError, match="no plan to split the layers of mistralai"):
        write(
            tool_named("torchtune"), source(others={"weights": "mistralai/Mistral-7B-v0.1"}, **full)
        )
