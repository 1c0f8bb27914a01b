"""`autofit.plan_grpo`: what fits, what is left for whom, and keys that TRL's own parser takes."""

import warnings
from pathlib import Path
from typing import Any

import pytest

import autofit
from autofit.api.plan_grpo import Plan
from autofit.core.errors import InputError
from autofit.core.hardware import GIB

SIZES: dict[str, Any] = {"prompt_len": 32, "completion_len": 64, "effective_batch": 8}


# One config, where a test is not about which one is chosen.
CHOSEN: dict[str, Any] = {"micro_batch_size": 2, "activation_checkpointing": "full"}


def plan(**changed: Any) -> Plan:
    card = {} if "gpu_mem" in changed else {"gpu": "rtx-4090"}
    return autofit.plan_grpo("tiny-llama", **{**SIZES, **card, **changed})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plan of a small model is written."""
    return tmp_path_factory.mktemp("plan") / "grpo.yaml"


@pytest.fixture(scope="module")
def whole(file: Path) -> Plan:
    return plan(generations=4, set={"lora_rank": 8}, output=file)


def test_all_of_a_small_model_fits_awake(whole: Plan) -> None:
    assert whole.fits
    config = whole.prediction.estimate.config
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (8, 1)
    assert config.activation_checkpointing == "none"
    assert whole.recommended["vllm_enable_sleep_mode"] is False
    assert whole.generator.sequences == 8
    share = (whole.generator.fixed + whole.generator.cache) / whole.prediction.budget.device_bytes
    assert 0 <= whole.recommended["vllm_gpu_memory_utilization"] - share < 0.01
    assert whole.notes[0] == "planned, not searched: nothing was measured."


def test_what_is_left_adds_up_to_the_card(whole: Plan) -> None:
    usable = whole.prediction.budget.cap_bytes("cuda")
    generator = whole.generator
    awake, on_host, dropped = whole.levels
    assert awake.training + generator.fixed + generator.cache == usable
    assert on_host.training == dropped.training == usable - generator.graphs
    assert (on_host.host, dropped.host) == (generator.weights, 0)
    assert {level.cache for level in whole.levels} == {generator.cache}


def test_its_own_parser_takes_the_keys(whole: Plan, file: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[test]'")
    from trl.scripts.grpo import make_parser

    assert file.read_text() == whole.text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script, training, model, _ = make_parser(prog="trl grpo").parse_args_and_config(
            ["--config", str(file)], fail_with_unknown_args=True
        )
    assert script.reward_funcs == ["accuracy_reward"]
    assert (training.per_device_train_batch_size, training.steps_per_generation) == (8, 1)
    assert (training.num_generations, training.max_completion_length) == (4, 64)
    assert (training.loss_type, training.beta, training.vllm_mode) == ("dapo", 0.0, "colocate")
    assert training.vllm_max_model_length == 96
    assert model.lora_r == 8


def test_little_memory_has_smaller_micro_batches_and_vllm_asleep() -> None:
    found = plan(gpu_mem=5, completion_len=2000)
    assert found.recommended["vllm_enable_sleep_mode"] is True
    peak = found.prediction.estimate.high
    assert peak <= found.levels[2].training
    assert found.levels[0].cache < found.generator.cache
    config = found.prediction.estimate.config
    assert config.micro_batch_size * config.gradient_accumulation_steps == 8


def test_where_nothing_fits_that_is_said() -> None:
    found = plan(gpu_mem=2)
    assert not found.fits
    assert found.to_dict()["fits"] == "no"
    assert found.levels[2].cache < 0


def test_what_is_given_is_not_chosen() -> None:
    found = plan(set=CHOSEN)
    config = found.prediction.estimate.config
    assert (config.micro_batch_size, config.activation_checkpointing) == (2, "full")
    assert found.recommended["steps_per_generation"] == 4


def test_a_server_leaves_the_card_to_the_training() -> None:
    found = plan(vllm="server", vllm_tensor_parallel=2, set=CHOSEN)
    assert found.levels == ()
    assert found.recommended["vllm_mode"] == "server"
    assert "vllm_gpu_memory_utilization" not in found.recommended
    assert found.generator.sequences == 16


def test_without_vllm_the_cache_is_in_the_models_own_format() -> None:
    """And transformers generates on a CPU, too."""
    half = plan(vllm="none", set=CHOSEN)
    full = plan(gpu=None, device="cpu", mem=2, vllm="none", set={**CHOSEN, "precision": "fp32"})
    assert full.fits
    for found in (half, full):
        assert found.recommended["use_vllm"] is False
        assert found.generator.fixed == 0
    assert full.generator.sequence == 2 * half.generator.sequence


def test_a_reference_is_held_where_it_is_asked(whole: Plan) -> None:
    asked = plan(beta=0.04, set={**CHOSEN, "precision": "bf16"})
    alone = plan(set={**CHOSEN, "precision": "bf16"})
    assert asked.prediction.estimate.config.reference == "resident"
    more = asked.at_rest - alone.at_rest
    assert more == pytest.approx(asked.generator.weights, rel=0.05)
    assert whole.prediction.estimate.config.reference is None


def test_two_devices_generate_half_each() -> None:
    found = plan(devices=2, set=CHOSEN)
    assert found.prediction.estimate.config.data_parallel == "fsdp"
    assert found.generator.sequences == 4
    assert found.prediction.estimate.high < 24 * GIB


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"generations": 3}, "3 generations do not divide an effective batch size of 8"),
        ({"generations": 1}, "generations must be a whole number from 2"),
        ({"vllm": "ray"}, "vllm must be one of colocate, server, none"),
        ({"seq_len": 3}, "unknown option 'seq_len'"),
        ({"gpu": None, "device": "cpu", "mem": 2}, "vLLM shares no CPU with a training by TRL"),
        ({"set": {"lora_rank": 8, "quantization": "int8"}}, "TRL refuses vLLM on the same card"),
    ],
)
def test_what_cannot_be_planned(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(**changed)


def test_a_search_sends_to_the_plan() -> None:
    with pytest.raises(InputError, match=r"is planned, not searched\. Use autofit estimate"):
        autofit.search("tiny-llama", task="grpo", gpu_mem=8)
