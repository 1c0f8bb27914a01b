"""Scripts with quantised weights and other precisions: really quantised, and trained as autofit trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.conftest import VERSIONS
from tests.export.emitted import (
    check_same_steps,
    losses_printed,
    model_of,
    module_of,
    saved_weights,
    setup_for,
)

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
CUDA = {"hardware": {"device": "cuda", "name": "x", "budget_gib": 8.0}}
DATA = Path(__file__).parents[2] / "examples" / "data"
Emit = Callable[..., str]


def quantised(model: Any) -> list[str]:
    """Names of the layers that hold their weight in 8 or 4 bits."""
    names = [
        name for name, each in model.named_parameters() if each.dtype in (torch.uint8, torch.int8)
    ]
    return sorted(
        name.replace("base_model.model.", "").replace(".base_layer", "") for name in names
    )


@pytest.mark.parametrize(
    ("task", "kind", "knobs"),
    [
        (
            "causal-lm",
            None,
            {"quantization": "nf4-dq", "lora_targets": "all-linear+head", "loss": "chunked"},
        ),
        ("causal-lm", None, {"quantization": "int8", "precision": "bf16"}),
        ("causal-lm", "gpt2", {"quantization": "nf4"}),
        ("causal-lm", "gpt2", {"quantization": "int8", "lora_targets": "attention"}),
        ("masked-lm", None, {"quantization": "nf4", "precision": "bf16-mixed"}),
        ("sequence-classification", None, {"quantization": "nf4", "precision": "bf16"}),
        ("image-classification", None, {"quantization": "int8"}),
    ],
)
def test_quantised_weights_train_as_autofit_trains_them(
    emit: Emit,
    architectures: dict[str, Any],
    tmp_path: Path,
    task: str,
    kind: str | None,
    knobs: dict[str, Any],
) -> None:
    architecture = architectures[kind or task]
    weights = saved_weights(task, architecture, tmp_path)
    setup = setup_for(task, architecture, {**LORA, **knobs}, weights)
    ours = quantised(setup.model)
    script = module_of(emit(task, {"model_config": architecture}, **dict(setup.config)))
    low = knobs.get("precision", "fp32") != "fp32"
    model = check_same_steps(script, setup, weights, rel=2e-3 if low else 1e-4)
    assert quantised(model) == ours != []
    assert not any("lm_head" in name or "classifier" in name for name in ours)


@pytest.mark.parametrize("kind", ["causal-lm", "gpt2"])
def test_random_weights_are_quantised_too(
    emit: Emit, architectures: dict[str, Any], kind: str
) -> None:
    knobs = {**LORA, "quantization": "nf4-dq", "precision": "bf16"}
    model = model_of(module_of(emit("causal-lm", {"model_config": architectures[kind]}, **knobs)))
    names = quantised(model)
    assert len(names) == (14 if kind == "causal-lm" else 8)
    held = dict(model.named_parameters())
    weight = next(each for each in held.values() if each.dtype == torch.uint8)
    assert type(weight).__name__ == "Params4bit"
    assert weight.quant_state.quant_type == "nf4"
    assert weight.quant_state.nested  # double quantised
    assert weight.numel() * 2 == weight.quant_state.shape.numel()
    assert all(each.dtype == torch.bfloat16 for each in held.values() if each.is_floating_point())


def test_nf4_trains_from_random_weights_and_goes_on_from_what_it_saved(
    emit: Emit, tmp_path: Path
) -> None:
    script, saved = emit(**LORA, quantization="nf4-dq", precision="bf16"), tmp_path / "saved"
    common = ("--data", DATA / "alice.txt", "--lr", "2e-2")
    losses = losses_printed(script, *common, "--steps", "20", "--output", saved)
    assert losses[-1] < losses[0] - 0.3

    # The adapters are in the quantised weights now, rounded as those are. This time they are saved by themselves.
    output = tmp_path / "adapters"
    again = losses_printed(script, *common, "--steps", "1", "--weights", saved, "--output", output)
    assert again[0] < losses[0] - 0.2
    assert (output / "adapter_model.safetensors").exists()


def test_int8_is_saved_and_loaded_again(emit: Emit, tmp_path: Path) -> None:
    script = module_of(emit(**LORA, quantization="int8"))
    model = model_of(script)
    ids = torch.randint(256, (4, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).loss.item()
        model.merge_and_unload().save_pretrained(tmp_path)
        again = model_of(script, tmp_path)
        assert again(input_ids=ids, labels=ids).loss.item() == pytest.approx(before, rel=1e-2)


def test_quantised_models_are_loaded_onto_the_gpu_and_not_moved_again(emit: Emit) -> None:
    text = emit(others=CUDA, **LORA, quantization="nf4", precision="bf16-mixed")
    compile(text, "emitted", "exec")
    assert "device_map=DEVICE" in text
    assert "model.to(DEVICE)" not in text
    assert "bnb_4bit_compute_dtype=torch.bfloat16" in text
    assert f"peft {VERSIONS['peft']}, bitsandbytes and accelerate" in " ".join(text.split())


def test_tf32_is_switched_on_before_anything_runs(emit: Emit) -> None:
    text = emit(others=CUDA, precision="tf32")
    compile(text, "emitted", "exec")
    main = text[text.index("__main__") :]
    assert main.index('set_float32_matmul_precision("high")') < main.index("build_model(")
    assert "dtype=torch.float32" in text


@pytest.mark.parametrize(  # the four layers of attention in each of two blocks; BERT has a pooler as well
    ("task", "head", "count"),
    [("causal-lm", "lm_head", 8), ("sequence-classification", "classifier", 9)],
)
def test_fp8_exchanges_the_layers_that_autofit_exchanges(
    emit: Emit, architectures: dict[str, Any], task: str, head: str, count: int
) -> None:
    """Float8Linear is made on a CPU too; only its product needs a GPU. A size of 120 is no multiple of 16."""
    odd = {**architectures[task], "intermediate_size": 120}
    text = emit(task, {**CUDA, "model_config": odd}, **LORA, precision="fp8")
    script = module_of(text.replace('DEVICE = "cuda"', 'DEVICE = "cpu"'))
    script.NUM_LABELS = 16
    model = model_of(script)
    names = [
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    ]
    assert len(names) == count
    assert not any(head in name for name in names)
    assert all(name.endswith("base_layer") for name in names)
    dtypes = {each.dtype for each in model.parameters()}
    assert dtypes == {torch.bfloat16}
    filled = [
        module for module in model.modules() if "in_sixteens" in repr(vars(module).get("forward"))
    ]
    assert len(filled) == (count if task == "sequence-classification" else 0)


@pytest.mark.parametrize("rows", [(2, 16), (3, 7)])
def test_fp8_products_get_their_rows_by_sixteen(emit: Emit, rows: tuple[int, int]) -> None:
    """Where they may be any number; packed text is cut so that they are."""
    assert "in_sixteens" not in emit("causal-lm", CUDA, precision="fp8")
    text = emit("sequence-classification", CUDA, precision="fp8")
    script, seen = module_of(text.replace('DEVICE = "cuda"', 'DEVICE = "cpu"')), []

    def product(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.shape)
        return inputs @ torch.ones(4, 5)

    inputs = torch.rand(*rows, 4)
    torch.testing.assert_close(script.in_sixteens(product, inputs), inputs @ torch.ones(4, 5))
    assert seen == [(32, 4)]


@pytest.mark.parametrize(
    ("task", "knobs", "others", "expected"),
    [
        ("image-classification", {}, CUDA, ["torch.backends.cudnn.allow_tf32 = False"]),
        (
            "image-classification",
            {"precision": "tf32"},
            CUDA,
            ['torch.set_float32_matmul_precision("high")'],
        ),
        ("image-classification", {}, {}, []),
        ("causal-lm", {}, CUDA, []),
    ],
)
def test_fp32_products_are_rounded_as_measured(
    emit: Emit, task: str, knobs: dict[str, Any], others: dict[str, Any], expected: list[str]
) -> None:
    lines = [
        line.partition("  # precision")[0].strip()
        for line in emit(task, others, **knobs).splitlines()
    ]
    assert [line for line in lines if line.startswith(("torch.backends", "torch.set_"))] == expected
