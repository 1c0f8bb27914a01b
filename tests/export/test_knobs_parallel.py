"""Scripts of several devices: a process each, the losses of one device, and weights saved whole by the first."""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from autofit.core.errors import InputError
from autofit.export.template import WIDTH
from autofit.models import load_preset
from autofit.setup.sharding import NEW_ENOUGH
from tests.export.emitted import losses_printed, module_of, saved_weights
from tests.ranks import on_ranks
from tests.tolerances import LOSS, LOSS_OF_8_BITS, LOSS_OF_16_BITS, assert_trained_alike

Emit = Callable[..., str]
ALICE = Path(__file__).parents[2] / "examples" / "data" / "alice.txt"
DDP = {"data_parallel": "ddp", "data_parallel_replicate": 2, "data_parallel_shard": 1}
FSDP: dict[str, Any] = {
    "data_parallel": "fsdp",
    "data_parallel_replicate": 1,
    "data_parallel_shard": 2,
}
FSDP |= {"reshard_after_forward": True, "fsdp_offload": "none"}
ZERO_2 = FSDP | {"reshard_after_forward": False}
HSDP = FSDP | {"data_parallel_replicate": 2}
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "pipeline_schedule": "1f1b"}
CUTS = {"cuts": (0, 1, 2)}
# of the 4 samples of each of 2 ranks
SPLIT = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
WHOLE = {"micro_batch_size": 4}
IN_STAGES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
NF4 = {"quantization": "nf4"} if NEW_ENOUGH else {}
LR = 1e-3

# transformers, peft and torch warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(script: str, *arguments: str) -> str:
    """What a rank prints; its processes are joined already, as torchrun would."""
    joined = dict.fromkeys(("init_process_group", "destroy_process_group"), mock.Mock())
    printed = io.StringIO()
    with (
        mock.patch.multiple(dist, **joined),
        mock.patch.object(sys, "argv", ["train.py", *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        module_of(script, "__main__")
    return printed.getvalue()


def losses_on_ranks(count: int, script: str, *arguments: str | Path) -> list[float]:
    first, *others = on_ranks(count, run, script, *map(str, arguments))
    assert not any(others), "one process tells"
    return [
        float(loss) for loss in re.findall(r"^step \d+: loss ([^\s,]+)", first, flags=re.MULTILINE)
    ]


def one_device(knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs of a script that does the same on one device."""
    rest = {name: value for name, value in knobs.items() if name not in HSDP | STAGES}
    return rest | {"micro_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    ("kind", "knobs", "world"),
    [
        ("causal-lm", {**DDP, **SPLIT}, 2),
        ("causal-lm", {**DDP, **WHOLE, **LORA, "loss": "chunked"}, 2),
        ("causal-lm", {**FSDP, **SPLIT, "activation_checkpointing": "full"}, 2),
        ("causal-lm", {**FSDP, **SPLIT, **LORA, **NF4, "loss": "chunked"}, 2),
        ("causal-lm", {**ZERO_2, **WHOLE, "precision": "bf16-mixed", "fsdp_offload": "cpu"}, 2),
        (
            "causal-lm",
            {**HSDP, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "loss": "chunked"},
            4,
        ),
        ("causal-lm", {**FSDP, **SPLIT, "precision": "fp16-mixed"}, 2),
        ("causal-lm", {**FSDP, **SPLIT, "optimizer": "adamw-8bit"}, 2),
        ("gpt2", {**FSDP, **WHOLE, "optimizer_in_backward": True}, 2),
        ("masked-lm", {**FSDP, **SPLIT}, 2),
        ("causal-lm", {**STAGES, **IN_STAGES}, 2),
        ("gpt2", {**STAGES, **IN_STAGES}, 2),  # whose embedding is its head
        ("causal-lm", {**STAGES, **IN_STAGES, **LORA, "activation_checkpointing": "full"}, 2),
        ("causal-lm", {**STAGES, **IN_STAGES, "pipeline_schedule": "gpipe", "loss": "chunked"}, 2),
    ],
)
def test_losses_and_weights_are_those_of_one_device(
    emit: Emit,
    architectures: dict[str, Any],
    tmp_path: Path,
    kind: str,
    knobs: dict[str, Any],
    world: int,
) -> None:
    task = "masked-lm" if kind == "masked-lm" else "causal-lm"
    weights = saved_weights(task, architectures[kind], tmp_path / "weights")
    others = {
        "model_config": architectures[kind],
        **(CUTS if STAGES.keys() <= knobs.keys() else {}),
    }
    given: tuple[str | Path, ...] = (
        "--data",
        ALICE,
        "--weights",
        weights,
        "--steps",
        "3",
        "--lr",
        str(LR),
    )
    given += ("--log-every", "1", "--output")
    expected = losses_printed(emit(task, others, **one_device(knobs)), *given, tmp_path / "alone")
    found = losses_on_ranks(world, emit(task, others, **knobs), *given, tmp_path / "ranks")
    tolerance = LOSS
    if "optimizer" in knobs:
        tolerance = LOSS_OF_8_BITS
    if "precision" in knobs:
        tolerance = LOSS_OF_16_BITS
    assert len(found) == 3
    assert found == pytest.approx(expected, abs=tolerance)

    (file,) = tmp_path.glob("alone/*.safetensors")
    alone, ranks = (
        safetensors.torch.load_file(tmp_path / each / file.name) for each in ("alone", "ranks")
    )
    assert alone.keys() <= ranks.keys()  # tied weights may be there by both names
    if tolerance == LOSS:
        assert_trained_alike(ranks, alone, lr=LR)
    else:
        # three steps there, or three the other way
        most = LR if "optimizer" in knobs else 2 * 3 * LR
        for name, weight in alone.items():
            torch.testing.assert_close(ranks[name], weight, rtol=0, atol=most)


def on_cards(emit: Emit, knobs: dict[str, Any], **facts: Any) -> str:
    hardware = {"device": "cuda", "name": "NVIDIA H200", "budget_gib": 141.0, **facts}
    text = emit(
        "causal-lm",
        {"hardware": hardware, "model_config": load_preset("llama-3.1-8b").config},
        **knobs,
    )
    compile(text, "train.py", "exec")
    return text


def test_the_command_starts_a_process_for_each_device(emit: Emit) -> None:
    assert "    torchrun --nproc-per-node 2 train.py --data FILE" in emit(**FSDP, **SPLIT)
    four = HSDP | {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
    text = on_cards(emit, four, nodes=2, devices=2)
    assert '    NODES="--nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"\n' in text
    assert "    torchrun --nproc-per-node 2 $NODES train.py --data FILE" in text
    assert "Measured on 4 x NVIDIA H200, within 141 GiB each" in text


def test_each_process_has_a_card_of_its_own(emit: Emit) -> None:
    text = on_cards(emit, FSDP | SPLIT)
    assert (
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n    dist.init_process_group("nccl")'
        in text
    )


def test_another_number_of_processes_is_refused(emit: Emit) -> None:
    with pytest.raises(SystemExit, match="start 2 processes with torchrun"):
        losses_printed(emit(**FSDP, **SPLIT), "--data", ALICE)


def test_what_a_knob_of_several_devices_sets_stands_in_the_script(emit: Emit) -> None:
    assert "fully_shard(part, reshard_after_forward=False)" in on_cards(emit, ZERO_2 | SPLIT)
    assert "fully_shard(part, reshard_after_forward=part is not model)" in on_cards(
        emit, FSDP | SPLIT
    )
    some = HSDP | {
        "data_parallel_replicate": 1,
        "data_parallel_shard": 4,
        "reshard_after_forward": 2,
    }
    assert "=2 if part is not model else False)" in on_cards(emit, some | {"micro_batch_size": 2})
    assert "offload_policy=CPUOffloadPolicy()" in on_cards(
        emit, FSDP | SPLIT | {"fsdp_offload": "cpu"}
    )
    mixed = on_cards(emit, FSDP | SPLIT | {"precision": "bf16-mixed"})
    assert "MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)" in mixed
    text = on_cards(emit, HSDP | {"micro_batch_size": 1, "gradient_accumulation_steps": 2})
    assert 'init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))' in text
    assert "DEVICES = 4  # a process each; data_parallel: fsdp, data_parallel_replicate: 2" in text


def test_what_it_cannot_do_is_refused_and_batch_sizes_are_of_each_device(emit: Emit) -> None:
    with pytest.raises(InputError, match="cannot express optimizer adamw-8bit"):
        emit(**FSDP, **WHOLE, optimizer="adamw-8bit", optimizer_in_backward=True)
    with pytest.raises(
        InputError,
        match="micro_batch_size 2 x gradient_accumulation_steps 4 on each of 2 devices is",
    ):
        emit(**FSDP, micro_batch_size=2, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    "knobs",
    [
        {"pipeline_schedule": "interleaved"},
        {"quantization": "nf4", **LORA},
        {"data_parallel": "ddp", "data_parallel_replicate": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_stages_that_it_has_no_lines_for_are_refused(emit: Emit, knobs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot express pipeline_parallel 2"):
        emit("causal-lm", CUTS, **{**STAGES, **IN_STAGES, **knobs})


def test_samples_of_several_lengths_do_not_go_through_stages(emit: Emit) -> None:
    workload = {"task": "causal-lm", "sequence_length": 64, "effective_batch_size": 8}
    others = {"workload": workload | {"packing": False}, **CUTS}
    with pytest.raises(InputError, match="samples of several lengths in the stages"):
        emit("causal-lm", others, **STAGES, **IN_STAGES)


@pytest.mark.parametrize("parallel", [DDP, FSDP, HSDP], ids=["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["full", "lora", "qlora", "compiled"])
def test_a_script_is_clean_and_short(
    emit: Emit, tmp_path: Path, parallel: dict[str, Any], name: str
) -> None:
    knobs: dict[str, dict[str, Any]] = {
        "full": {"precision": "bf16-mixed", "activation_checkpointing": "full", "loss": "chunked"},
        "lora": {
            **LORA,
            "precision": "bf16",
            "activation_checkpointing": "full:1+selective",
            "attention": "flash",
        },
        "qlora": {
            **LORA,
            "precision": "bf16",
            "quantization": "nf4",
            "activation_checkpointing": "alternate",
        },
        "compiled": {
            "precision": "bf16-mixed",
            "compile": "default",
            "loss": "fused",
            "kernels": "liger",
        },
    }
    text = on_cards(
        emit,
        {**parallel, "micro_batch_size": 1, **knobs[name], "gradient_accumulation_steps": None},
    )
    assert len(text.splitlines()) <= 200
    assert_clean(text, tmp_path)


@pytest.mark.parametrize("knobs", [{}, {**LORA, "activation_checkpointing": "full"}])
def test_a_script_of_stages_is_clean(emit: Emit, tmp_path: Path, knobs: dict[str, Any]) -> None:
    text = emit("causal-lm", CUTS, **STAGES, **IN_STAGES, **knobs)
    assert "CUTS = (0, 1, 2)" in text
    assert_clean(text, tmp_path)


def assert_clean(text: str, tmp_path: Path) -> None:
    """ruff finds nothing in a script."""
    (tmp_path / "train.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "E,F"]
    checked = subprocess.run(
        [*ruff, "--line-length", str(WIDTH), str(tmp_path)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_experts_that_no_token_reaches_hold_nothing_up(
    emit: Emit, architectures: dict[str, Any]
) -> None:
    mixture: dict[str, Any] = {
        "model_config": {**architectures["causal-lm"], "num_local_experts": 4}
    }
    assert "find_unused_parameters=True" in emit("causal-lm", mixture, **DDP, **SPLIT)
    assert "find_unused_parameters" not in emit("causal-lm", **DDP, **SPLIT)
    newest = mixture | {"versions": {"torch": "2.13.0"}}
    assert "model.set_reduce_scatter_unused_params(True)" in emit(
        "causal-lm", newest, **FSDP, **SPLIT
    )
    with pytest.raises(InputError, match="cannot express data_parallel fsdp"):
        emit("causal-lm", mixture | {"versions": {"torch": "2.12.1"}}, **FSDP, **SPLIT)
