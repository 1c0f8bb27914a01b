"""Scripts whose blocks run otherwise: checkpointing, attention, kernels, compile."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from tests.export.architectures import ARCHITECTURES
from tests.export.emitted import (
    check_same_steps,
    losses_of,
    model_of,
    module_of,
    saved_weights,
    setup_for,
)
from tests.tolerances import LOSS

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
CUDA = {"hardware": {"device": "cuda", "name": "x", "budget_gib": 8.0}}
Emit = Callable[..., str]


@pytest.mark.parametrize(
    ("task", "kind", "knobs"),
    [
        ("causal-lm", None, {"activation_checkpointing": "selective"}),
        (
            "causal-lm",
            "gpt2",
            {"activation_checkpointing": "selective", **LORA, "quantization": "nf4"},
        ),
        ("causal-lm", None, {"activation_checkpointing": "alternate", **LORA}),
        ("masked-lm", None, {"activation_checkpointing": "alternate", "precision": "bf16-mixed"}),
        ("causal-lm", None, {"activation_checkpointing": "full:1", **LORA}),
        (
            "causal-lm",
            None,
            {"activation_checkpointing": "full:1+selective", "micro_batch_size": 2},
        ),
        (
            "image-classification",
            None,
            {"activation_checkpointing": "selective", "micro_batch_size": 4},
        ),
    ],
)
def test_checkpointed_blocks_train_as_autofit_trains_them(
    emit: Emit,
    architectures: dict[str, Any],
    tmp_path: Path,
    task: str,
    kind: str | None,
    knobs: dict[str, Any],
) -> None:
    architecture = architectures[kind or task]
    weights = saved_weights(task, architecture, tmp_path)
    setup = setup_for(task, architecture, knobs, weights)
    check_same_steps(
        module_of(emit(task, {"model_config": architecture}, **dict(setup.config))), setup, weights
    )


def kept_bytes(script: Any, model: Any) -> int:
    """Bytes of what autograd saves in a forward pass, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(256, (8, 64))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return sum(storages.values())


def test_some_blocks_keep_their_share_of_what_full_saves(
    emit: Emit, architectures: dict[str, Any]
) -> None:
    four = {"model_config": {**architectures["causal-lm"], "num_hidden_layers": 4}}
    kept = {}
    for value in ("none", "alternate", "full:1", "full"):
        script = module_of(emit("causal-lm", four, activation_checkpointing=value))
        kept[value] = kept_bytes(script, model_of(script))
    assert kept["none"] > 2 * kept["full"]
    for value, share in (("alternate", 1 / 2), ("full:1", 1 / 4)):
        expected = kept["none"] - share * (kept["none"] - kept["full"])
        assert kept[value] == pytest.approx(expected, rel=0.1)


def test_selective_computes_no_product_again(emit: Emit) -> None:
    flops = {}
    for value in ("none", "selective", "full"):
        script = module_of(emit(activation_checkpointing=value))
        model = model_of(script)
        ids = torch.randint(256, (2, 64))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[value] = counter.get_total_flops()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert flops["selective"] == flops["none"]
    # Of two blocks: keys and values have half the heads, and the last product's output is not needed again.
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128)
    assert flops["full"] == flops["none"] + 2 * 2 * 64 * weights


def test_selective_keeps_products_convolutions_and_attention_alone(emit: Emit) -> None:
    keep = module_of(emit(activation_checkpointing="selective")).keep_products
    aten = torch.ops.aten
    kept = (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.convolution,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    for operator in (*kept, aten._scaled_mm, aten._scaled_dot_product_efficient_attention):
        assert keep(None, operator.default) is CheckpointPolicy.MUST_SAVE, operator
    for operator in (
        aten.mul.Tensor,
        aten.lgamma.default,
        aten.native_layer_norm.default,
        int8_product(),
    ):
        assert keep(None, operator) is CheckpointPolicy.PREFER_RECOMPUTE, operator


def int8_product() -> Any:
    """What bitsandbytes does to a product; autofit computes it again."""
    importlib.import_module("bitsandbytes")
    return torch.ops.bitsandbytes.int8_mm_dequant.default


@pytest.fixture
def captured_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile that captures and partitions graphs, but generates no code, which takes tens of seconds."""
    modes = []
    plain = torch.compile

    def compiled(function: Any, mode: str | None = None) -> Any:
        modes.append(mode)
        return plain(function, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compiled)
    before = (
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.accumulated_recompile_limit,
    )
    yield modes
    torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = before
    torch._functorch.config.activation_memory_budget = 1.0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        ("causal-lm", {"compile": "default"}),
        (
            "causal-lm",
            {
                "compile": "max-autotune-no-cudagraphs",
                "activation_checkpointing": "selective",
                **LORA,
            },
        ),
        (
            "causal-lm",
            {"compile": "default", "activation_checkpointing": "alternate", "loss": "chunked"},
        ),
        ("gpt2", {"compile": "default", "activation_checkpointing": "full"}),
        ("causal-lm", {"compile": "default", **LORA, "quantization": "nf4", "precision": "bf16"}),
    ],
)
def test_compiled_blocks_compute_the_same(
    emit: Emit,
    architectures: dict[str, Any],
    captured_only: list[Any],
    kind: str,
    knobs: dict[str, Any],
) -> None:
    others = {"model_config": architectures[kind]}
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    losses = []
    for given in ({**knobs, "compile": "none"}, knobs):
        torch.manual_seed(0)
        script = module_of(emit("causal-lm", others, **given))
        losses.append(losses_of(script, model_of(script), batch))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if "precision" in knobs else 1e-4)
    assert len(captured_only) == 2  # one for each block
    assert captured_only[0] == (None if knobs["compile"] == "default" else knobs["compile"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_the_compilers_budget_is_set_before_it_runs(emit: Emit) -> None:
    text = emit(compile="default", activation_checkpointing="budget-0.5")
    compile(text, "emitted", "exec")
    main = text[text.index("__main__") :]
    assert main.index("activation_memory_budget = 0.5") < main.index("build_model(")


def test_a_compiled_script_trains_on_a_budget(emit: Emit, monkeypatch: pytest.MonkeyPatch) -> None:
    # A block is cut into a forward and a backward as by Inductor, which takes 20 s for kernels more.
    parting = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", parting)
    # each is compiled
    one = {"model_config": {**ARCHITECTURES["causal-lm"], "num_hidden_layers": 1}}
    script = module_of(
        emit("causal-lm", one, compile="default", activation_checkpointing="budget-0.5")
    )
    torch._functorch.config.activation_memory_budget = 0.5
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    try:
        losses = losses_of(script, model_of(script), {"input_ids": ids, "labels": ids})
    finally:
        torch._functorch.config.activation_memory_budget = 1.0
        torch._dynamo.reset()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("knobs", "patched"), [({}, "model=model,"), (LORA, "model=model,")])
def test_kernels_are_ligers_without_its_losses(
    emit: Emit, knobs: dict[str, Any], patched: str
) -> None:
    text = emit(others=CUDA, kernels="liger", **knobs)
    compile(text, "emitted", "exec")
    assert "import _apply_liger_kernel_to_instance as liger" in text
    call = text[text.index("    liger(") :]
    assert patched in call[:200]
    assert "cross_entropy=False" in call[:200]
    assert "fused_linear_cross_entropy=False" in call[:200]
    assert "liger-kernel" in text


def test_flash_is_pytorchs_own_around_forward_and_backward(emit: Emit) -> None:
    split = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    text = emit(others=CUDA, attention="flash", precision="bf16-mixed", **split)
    compile(text, "emitted", "exec")
    assert "from torch.nn.attention import SDPBackend, sdpa_kernel" in text
    inside = text[
        text.index("        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # attention: flash") :
    ]
    assert inside.index("            with torch.autocast") < inside.index(
        "            loss.backward()"
    )
    assert inside.index("            loss.backward()") < inside.index("        batch_loss +=")


def test_flash_takes_pytorchs_kernel_on_a_cpu_too(emit: Emit) -> None:
    """Refused there by autofit, for it is what sdpa takes anyway; but it runs, which shows that the lines are right."""
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    losses = []
    for value in ("sdpa", "flash"):
        torch.manual_seed(0)
        script = module_of(emit(attention=value))
        losses.append(losses_of(script, model_of(script), {"input_ids": ids, "labels": ids}))
    assert losses[1] == pytest.approx(losses[0], abs=LOSS)


def test_flash_is_flash_attn_where_that_was_there(emit: Emit) -> None:
    text = emit(
        others={**CUDA, "versions": {"flash-attn": "2.8.3"}}, attention="flash", precision="bf16"
    )
    assert 'set_attn_implementation("flash_attention_2")' in text
    assert "sdpa_kernel" not in text
    assert "transformers and flash-attn" in " ".join(text.split())
