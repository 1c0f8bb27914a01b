"""axolotl: what its keys hold, and what it does otherwise. Its own parser reads them in test_own_parsers."""

from typing import Any

import pytest
import yaml

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import ATTENTION, CASES, LORA, source


def exported(**knobs: Any) -> Export:
    return write(tool_named("axolotl"), source(**knobs))


def keys(**knobs: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(exported(**knobs).files["axolotl.yaml"]))


def departures(**knobs: Any) -> dict[str, bool]:
    return {each.knob: each.may_not_fit for each in exported(**knobs).departures}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("text", {"type": "completion", "field": "text"}),
        (
            "messages",
            {"type": "chat_template", "roles_to_train": ["assistant"], "train_on_eos": "turn"},
        ),
        (
            "prompt+completion",
            {
                "type": {
                    "field_instruction": "prompt",
                    "field_output": "completion",
                    "format": "{instruction}",
                    "no_input_format": "{instruction}",
                }
            },
        ),
    ],
)
def test_the_data_of_the_search_are_read_and_learnt_alike(form: str, kind: dict[str, Any]) -> None:
    made = write(tool_named("axolotl"), source(others={"data": "/data/rows.jsonl", "form": form}))
    told = yaml.safe_load(made.files["axolotl.yaml"])
    assert told["datasets"] == [{"path": "/data/rows.jsonl", "ds_type": "json", **kind}]
    assert told["train_on_inputs"] is False


def test_full_training_in_bfloat16_is_told_as_autocast_and_named() -> None:
    told = keys(**CASES["full"])
    assert (told["bf16"], told["bfloat16"], told["gradient_checkpointing"]) == (True, False, True)
    assert told["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert departures(**CASES["full"]) == {"precision": True}


def test_adapters_are_held_as_measured() -> None:
    told = keys(**LORA)
    assert (told["bf16"], told["bfloat16"], told["peft_autocast_adapter_dtype"]) == (
        False,
        True,
        False,
    )
    assert (told["adapter"], told["lora_r"], told["lora_alpha"], told["lora_dropout"]) == (
        "lora",
        16,
        32,
        0.0,
    )
    assert told["lora_mlp_kernel"] is False
    assert not departures(**LORA)
    assert keys(lora_rank=8, lora_targets="attention")["lora_target_modules"] == list(ATTENTION)


@pytest.mark.parametrize(("value", "nested"), [("nf4", False), ("nf4-dq", True)])
def test_four_bits_are_nf4(value: str, nested: bool) -> None:
    told = keys(**{**LORA, "quantization": value})
    assert (told["adapter"], told["load_in_4bit"]) == ("qlora", True)
    assert told["bnb_config_kwargs"] == {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
    }


def test_eight_bits_keep_the_plain_adapter() -> None:
    told = keys(**{**LORA, "quantization": "int8"})
    assert (told["adapter"], told["load_in_8bit"], told["load_in_4bit"]) == ("lora", True, False)


def test_checkpointing_in_all_its_kinds() -> None:
    assert (
        keys(activation_checkpointing="alternate")["gradient_checkpointing_kwargs"][
            "every_n_layers"
        ]
        == 2
    )
    assert (
        "aten::mm" in keys(activation_checkpointing="selective")["selective_checkpointing"]["save"]
    )
    with_adapters = keys(**LORA, activation_checkpointing="selective")
    assert with_adapters["selective_checkpointing"]["save"] == ["attention"]
    assert departures(**LORA, activation_checkpointing="selective") == {
        "activation_checkpointing": False
    }
    assert (
        departures(compile="default", activation_checkpointing="budget-0.5")[
            "activation_checkpointing"
        ]
        is True
    )
    assert (
        keys(activation_checkpointing="full", activation_offload="cpu")["activation_offloading"]
        == "hidden_states"
    )
    assert departures(activation_offload="cpu") == {"activation_offload": True}


def test_torchaos_optimizers_go_by_axolotls_names() -> None:
    assert keys(optimizer="adamw-fp8")["optimizer"] == "ao_adamw_fp8"
    assert keys(optimizer="adamw-4bit")["optimizer"] == "ao_adamw_4bit"
    assert not departures(optimizer="adamw-4bit")
    assert keys(optimizer="adamw-8bit")["optimizer"] == "adamw_bnb_8bit"


def test_the_plugin_is_named_where_a_key_of_it_is() -> None:
    assert "plugins" not in keys()
    fused = keys(loss="fused")
    assert fused["plugins"] == ["axolotl.integrations.liger.LigerPlugin"]
    assert (fused["liger_fused_linear_cross_entropy"], fused["liger_rms_norm"]) == (True, False)
    assert keys(kernels="liger")["liger_rms_norm"] is True
    assert departures(loss="chunked") == {"loss": True}
    assert "plugins" not in keys(**LORA, loss="chunked")  # whose bfloat16 the plugin does not know
    cut = keys(precision="bf16-mixed", loss="chunked", kernels="liger")
    assert [each.rpartition(".")[2] for each in cut["plugins"]] == [
        "LigerPlugin",
        "CutCrossEntropyPlugin",
    ]
    assert (cut["cut_cross_entropy"], cut["liger_fused_linear_cross_entropy"]) == (True, False)
    assert departures(precision="bf16-mixed", loss="chunked")["loss"] is False


def test_the_mode_that_times_kernels_is_told_by_what_it_sets() -> None:
    told = keys(compile="max-autotune-no-cudagraphs")
    assert told["torch_compile_options"] == {"max_autotune_gemm": True, "triton.cudagraphs": False}


def test_axolotl_streams_frozen_layers_only() -> None:
    adapted = {**LORA, "parameter_offload": "cpu"}
    assert keys(**adapted)["layer_offloading"] is True
    assert not departures(**adapted)
    assert keys(**{**adapted, "parameter_offload": "cpu:4"})["layer_offloading"] is True
    assert keys(parameter_offload="cpu")["layer_offloading"] is False
    assert departures(parameter_offload="cpu")["parameter_offload"] is True


def test_beside_split_layers_what_axolotl_refuses_is_left_out_and_named() -> None:
    """Liger's norms and losses."""
    knobs = {
        "tensor_parallel": 2,
        "data_parallel": "fsdp",
        "kernels": "liger",
        "loss": "fused",
    }
    told = keys(**knobs)
    assert told["tensor_parallel_size"] == 2
    assert (told["liger_rms_norm"], told["liger_rope"]) == (False, True)
    assert told["liger_fused_linear_cross_entropy"] is False
    assert {"kernels", "loss"} <= departures(**knobs).keys()

    whole = {**knobs, "tensor_parallel": 1}
    assert keys(**whole)["liger_rms_norm"] is True
    assert keys(**whole)["liger_fused_linear_cross_entropy"] is True
    assert not {"kernels", "loss"} & departures(**whole).keys()
