"""loss: the loss and gradients of the model itself, from logits that never exist all at once."""

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.config import Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Traits, Workload
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup
from autofit.setup.deferred_logits import Deferral, DeferredLogits, Pending, Step
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.techniques.loss import chunk_rows, is_plain, scale_and_cap, token_slices
from autofit.training.build import build
from autofit.training.step import accumulate, train_step
from tests import tiny
from tests.techniques.contract import EFFECTIVE_BATCH, Effect

CHUNKED = {"loss": "chunked"}
HEAD_LORA = {"lora_rank": 4, "lora_targets": "all-linear+head"}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny.LLAMA,
    "tied": tiny.LLAMA | {"tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    },
    "gemma2, soft-capped": SIZES
    | {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 0.7},
    "granite, scaled": SIZES | {"model_type": "granite", "logits_scaling": 3.0},
    "cohere, scaled": SIZES | {"model_type": "cohere", "logit_scale": 0.3},
    "phi, with a bias": SIZES | {"model_type": "phi"},
    "mixtral, with another term": SIZES
    | {
        "model_type": "mixtral",
        "num_local_experts": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
}


def workload_of(config: dict[str, Any]) -> Workload:
    model = HuggingFaceModel("tiny", "causal-lm", config, {"kind": "directory", "path": "tiny"})
    return huggingface_workload(model, sequence_length=16, effective_batch_size=4)


def living(workload: Workload) -> nn.Module:
    """With a head whose logits are large enough to be capped, and biases that are not zero."""
    torch.manual_seed(0)
    model = workload.model()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and name.endswith("bias"):
            nn.init.normal_(parameter.data, 0.0, 0.1)
    model.get_output_embeddings().weight.data.mul_(5)
    # build() sets it to train; no tiny model here draws dropout but gpt2 and phi
    return model.eval()


def uneven(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padding of another length in every sample, its labels ignored."""
    labels, mask = batch["labels"].clone(), torch.ones_like(batch["input_ids"])
    for sample, length in enumerate((16, 5, 9, 2)):
        labels[sample, length:], mask[sample, length:] = -100, 0
    return batch | {"labels": labels, "attention_mask": mask}


def step(
    workload: Workload, knobs: Mapping[str, Value], model: nn.Module
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one step on unevenly padded samples, without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with contextlib.closing(build(workload, knobs, tiny.CPU, model=model)) as setup:
        draws = torch.Generator().manual_seed(1)
        for name, parameter in setup.trainable():
            # the same ones in every precision, and B not zero, or A's gradient is
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=draws) * 0.02)
        loss = float(accumulate(setup, uneven(workload.batch(4))))
        return loss, {name: each.grad for name, each in setup.trainable() if each.grad is not None}


@pytest.mark.parametrize(
    "knobs", [{}, HEAD_LORA, {"micro_batch_size": 2, "activation_checkpointing": "full"}], ids=str
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_and_the_gradients_are_those_of_the_model_itself(
    kind: str, knobs: dict[str, Value]
) -> None:
    if knobs is HEAD_LORA and MODELS[kind]["model_type"] == "mixtral":
        pytest.skip("its experts are no linear layers")
    workload = workload_of(MODELS[kind])
    model = living(workload)
    loss, gradients = step(workload, CHUNKED | knobs, copy.deepcopy(model))
    own, expected = step(workload, knobs, model)
    assert loss == pytest.approx(own, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


# peft asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}], ids=str
)
def test_inside_a_peft_model_too(options: dict[str, Any]) -> None:
    """A PeftModel runs the forward of the model inside, which computes the loss, without its hooks."""
    from peft import LoraConfig, get_peft_model

    workload = workload_of(MODELS["llama"])
    given = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(living(workload), LoraConfig(**given))
    loss, gradients = step(workload, CHUNKED | {"micro_batch_size": 2}, copy.deepcopy(model))
    own, expected = step(workload, {"micro_batch_size": 2}, model)
    assert loss == pytest.approx(own, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_the_soft_cap_and_the_scale_matter_to_these_losses() -> None:
    """Or the test above would pass without them."""
    for kind, key in (
        ("gemma2, soft-capped", "final_logit_softcapping"),
        ("granite, scaled", "logits_scaling"),
    ):
        workload = workload_of(MODELS[kind])
        model = living(workload)
        with torch.no_grad():
            loss = model(**workload.batch(4)).loss
            setattr(model.config, key, 1e6 if "cap" in key else 1.0)
            assert abs(model(**workload.batch(4)).loss - loss) > 0.01 * loss


@pytest.mark.parametrize(  # of adapters on the head, a fresh GradScaler's factor makes infinite gradients in fp16
    ("precision", "knobs"),
    [
        ("bf16", {}),
        ("bf16-mixed", {}),
        ("fp16-mixed", {}),
        ("bf16", HEAD_LORA),
        ("bf16-mixed", HEAD_LORA),
    ],
)
def test_in_low_precision_it_is_as_near_to_fp32_as_the_standard_loss(
    precision: str, knobs: dict[str, Value]
) -> None:
    workload = tiny.llama_workload()
    model = living(workload)

    def errors(loss: str) -> dict[str, float]:
        low = {"precision": precision, "loss": loss}
        value, gradients = step(workload, knobs | low, copy.deepcopy(model))
        scale = 65536.0 if precision == "fp16-mixed" else 1.0  # of a fresh GradScaler
        assert value == pytest.approx(exact, rel=1e-3)
        return {
            name: float((gradients[name].float() / scale - each).norm() / each.norm())
            for name, each in expected.items()
        }

    exact, expected = step(workload, knobs, copy.deepcopy(model))
    chunked, standard = errors("chunked"), errors("standard")
    assert max(standard.values()) > 1e-4
    assert sum(chunked.values()) < 1.2 * sum(standard.values())
    assert max(chunked.values()) < 1.5 * max(standard.values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("knobs", [{}, {"micro_batch_size": 1}, HEAD_LORA], ids=str)
def test_the_gradient_of_each_parameter_is_accumulated_once_a_backward(
    tied: bool, knobs: dict[str, Value]
) -> None:
    """A hook that fires per chunk would step the head several times when the optimizer runs in the backward."""
    workload = tiny.llama_workload(tie_word_embeddings=tied)
    with contextlib.closing(
        build(workload, CHUNKED | knobs, tiny.CPU, model=living(workload))
    ) as setup:
        fired: Counter[str] = Counter()
        for name, parameter in setup.trainable():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
        accumulate(setup, workload.batch(4))
        backwards = 4 // setup.micro_batch_size
        assert fired == dict.fromkeys((name for name, _ in setup.trainable()), backwards)


def test_its_gradients_can_be_had_once() -> None:
    workload = tiny.llama_workload()
    with contextlib.closing(build(workload, CHUNKED, tiny.CPU)) as setup:
        loss = setup.model(**workload.batch(4)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="was differentiated before"):
            loss.backward()


def test_a_head_alone_can_be_trained() -> None:
    workload = tiny.llama_workload()

    def gradient(loss: str) -> torch.Tensor:
        model = living(workload)
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
        _, gradients = step(workload, {"loss": loss}, model)
        assert gradients.keys() == {"lm_head.weight"}
        return gradients["lm_head.weight"]

    torch.testing.assert_close(gradient("chunked"), gradient("standard"), rtol=1e-4, atol=1e-6)


def test_hooks_on_the_head_run_and_hooks_of_offloading_do_not_see_its_chunks() -> None:
    workload = tiny.llama_workload()
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with contextlib.closing(build(workload, CHUNKED, tiny.CPU, model=living(workload))) as setup:
        setup.step_contexts.append(
            lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        )
        own, expected = step(workload, {}, living(workload))
        seen: list[int] = []
        handle = setup.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
        loss = accumulate(setup, uneven(workload.batch(4)))
        handle.remove()
        assert float(loss) == pytest.approx(own, rel=1e-5)
        assert len(seen) == 8 + 1  # every chunk, and the stand-in
        torch.testing.assert_close(
            setup.model.lm_head.weight.grad, expected["lm_head.weight"], rtol=1e-4, atol=1e-6
        )
    assert saved
    assert not [shape for shape in saved if shape in ((8, 64), (64, 64), (4, 16, 64))]


def test_a_chunk_is_small_beside_all_and_large_enough_for_matrix_units() -> None:
    assert chunk_rows(8192, 4096, 128_256) == 264  # 8192 x 4096 / 128256 = 261 tokens, in eights
    assert chunk_rows(8192, 768, 50_257) == 256
    assert chunk_rows(32_768, 4096, 128_256) == 1048
    assert chunk_rows(512, 256, 32_000) == 64
    assert chunk_rows(65_536, 4096, 1000) == 8192
    assert chunk_rows(1, 8, 8) == 1
    assert chunk_rows(9, 8, 8) == 2


VOCABULARY, TOKENS, WIDTH = 4096, 128, 32


def peak_of_a_head(loss: str, *, trained: bool) -> int:
    """The tracked bytes that forward and backward add at most, of a model that is little but its head."""
    config = tiny.LLAMA | {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    workload = huggingface_workload(
        HuggingFaceModel("tiny", "causal-lm", config, {}),
        sequence_length=32,
        effective_batch_size=4,
    )
    model = workload.model()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(trained)
    with contextlib.closing(build(workload, {"loss": loss}, tiny.CPU, model=model)) as setup:
        batch = workload.batch(4)
        with StorageTracker() as tracker:
            tracker.see([*model.parameters(), *model.buffers()])
            before = tracker.live
            accumulate(setup, batch)
            return tracker.peak - before


@pytest.mark.parametrize("trained", [False, True])
def test_the_peak_falls_by_what_the_logits_took(trained: bool) -> None:
    """In the standard loss: the logits, their log-probabilities, and the gradient of either. In chunks: the same of an
    eighth of the tokens, beside the gradient of the head's weight, which is there from the first chunk."""
    logits, weight = TOKENS * VOCABULARY * 4, VOCABULARY * WIDTH * 4
    standard, chunked = (peak_of_a_head(each, trained=trained) for each in ("standard", "chunked"))
    assert standard - chunked == pytest.approx(
        3 * logits - 3 * logits / 8 - trained * weight, rel=0.1
    )


def test_few_tokens_and_a_high_rank_on_the_head_need_more_in_chunks() -> None:
    """Why the loss has no memory order: a chunk's gradient of such an adapter stands beside the sum of them."""

    def peak(loss: str, rank: int) -> int:
        workload = tiny.llama_workload(1, vocab_size=VOCABULARY)
        knobs = {"loss": loss, "lora_rank": rank, "lora_targets": "all-linear+head"}
        with (
            StorageTracker() as tracker,
            contextlib.closing(build(workload, knobs, tiny.CPU)) as setup,
        ):
            for _ in range(2):
                train_step(setup, workload.batch(1))
        return tracker.peak

    assert peak("chunked", 64) > 1.05 * peak("standard", 64)  # 64 is more than the 16 tokens
    assert peak("chunked", 4) < peak("standard", 4)


def test_what_cannot_work_is_refused_early_in_a_sentence() -> None:
    def reason(workload: Workload, value: str = "chunked", **knobs: Value) -> str | None:
        return refuse(
            canonicalize({"loss": value, **knobs}, workload, hardware), workload, hardware
        )

    hardware = tiny.CPU
    llama = tiny.llama_workload()
    assert reason(llama) is None
    assert reason(replace(llama, task="custom")) is None
    assert "may need the logits; use standard." in reason(tiny.mlp_workload())
    assert "not masked-lm; use standard." in reason(replace(llama, task="masked-lm"))
    traits = Traits(
        parameters=1,
        blocks=2,
        linears=1,
        attention=True,
        sdpa=True,
        batch_norm=False,
        dropout=False,
    )
    assert "use standard." in reason(replace(llama, traits=traits))
    assert reason(replace(llama, traits=replace(traits, head=True))) is None
    assert "CUDA only; use chunked." in reason(llama, "fused")


def test_on_cuda_fused_needs_liger_and_a_head_without_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    technique, llama = technique_named("loss"), tiny.llama_workload()
    cuda = replace(tiny.CPU, device="cuda")
    config = canonicalize({"loss": "fused"}, llama, tiny.CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install liger-kernel" in technique.refuse(config, llama, cuda)
    # to plan it need not be installed
    assert technique.refuse(config, llama, replace(cuda, here=False)) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert technique.refuse(config, llama, cuda) is None
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name: None)
        assert technique.refuse(config, llama, cuda).startswith(
            "fused compiles its kernels: Triton needs a C compiler"
        )
        assert technique.refuse(config, llama, replace(cuda, here=False)) is None
    assert "would skip its adapters; use chunked." in technique.refuse(
        canonicalize({"loss": "fused", **HEAD_LORA}, llama, tiny.CPU), llama, cuda
    )
    assert technique.choices(cuda) == technique.values
    assert technique.choices(tiny.CPU) == ("standard", "chunked")
    assert technique.package("fused") == "liger-kernel"


def wrapped(change: Callable[[Any], None]) -> Workload:
    """Training a Llama that something was done to."""
    workload = tiny.llama_workload()

    def model() -> nn.Module:
        made = workload.model()
        change(made)
        return made

    return replace(workload, model=model)


def add_own_loss(model: Any) -> None:
    inner = model.forward

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        output = inner(input_ids=input_ids, labels=labels, **kwargs)
        output.loss = functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output

    model.forward = forward


def add_other_loss_function(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()


def add_hook_on_the_head(model: Any) -> None:
    """It changes what the head returns: the stand-in notes that, and the hook runs again when logits are made."""
    model.lm_head.register_forward_hook(lambda head, args, logits: logits * 3.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_own_loss, "uses its logits for more than a causal LM's loss; use standard"),
        (add_other_loss_function, "not a causal language model of transformers"),
        (add_hook_on_the_head, "the chunked loss is .* where the model's own is .*; use standard"),
    ],
)
def test_a_model_that_does_something_else_is_refused_and_left_alone(
    change: Any, reason: str
) -> None:
    workload = wrapped(change)
    model = workload.model()
    before = [list(vars(module)) for module in model.modules()]
    with pytest.raises(RefusedError, match=reason):
        build(workload, CHUNKED, tiny.CPU, model=model)
    assert [list(vars(module)) for module in model.modules()] == before


def test_a_factory_that_draws_other_tokens_each_time_is_no_reason_to_refuse() -> None:
    def drawn(n: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 16, (n, 16))
        return {"input_ids": tokens, "labels": tokens}

    workload = replace(tiny.llama_workload(), batch=drawn)
    with contextlib.closing(build(workload, {"loss": "chunked"}, tiny.CPU)) as setup:
        assert float(train_step(setup, drawn(4))) > 0


def test_masked_language_models_are_refused_when_nothing_says_what_they_are() -> None:
    sizes = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes |= {"intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}
    model = HuggingFaceModel("tiny", "masked-lm", sizes, {"kind": "directory", "path": "tiny"})
    workload = replace(
        huggingface_workload(model, sequence_length=16, effective_batch_size=4), task="custom"
    )
    with pytest.raises(RefusedError, match="use standard"):
        build(workload, CHUNKED, tiny.CPU)


# of which Liger's has a stand-in
@pytest.mark.parametrize(("value", "chunks"), [("chunked", [8] * 16), ("fused", [])])
def test_under_fake_tensors_it_is_traced_without_a_comparison(
    value: str, chunks: list[int]
) -> None:
    workload = tiny.llama_workload()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        contextlib.closing(build(workload, {}, tiny.CPU)) as setup,
    ):
        technique_named("loss").trace(setup, value)
        with _Softmax() as softmax:
            workload_loss = setup.model(**workload.batch(4)).loss
            workload_loss.backward()
    assert softmax.rows == chunks
    assert all(parameter.grad.shape == parameter.shape for parameter in setup.model.parameters())


def stand_in_for_liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """What Liger documents that its function computes."""
    assert options["reduction"] == "sum"
    logits = functional.linear(hidden, weight, bias).float()
    if cap := options["softcap"]:
        logits = cap * torch.tanh(logits / cap)
    return functional.cross_entropy(
        logits, target, ignore_index=options["ignore_index"], reduction="sum"
    )


@pytest.fixture
def liger_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ModuleType("liger_kernel.transformers.functional")
    functions.liger_fused_linear_cross_entropy = stand_in_for_liger
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functions.__name__, functions)
    monkeypatch.setattr("autofit.techniques.loss.Loss.refuse", lambda *_: None)


@pytest.mark.usefixtures("liger_on_the_cpu")
@pytest.mark.parametrize("kind", MODELS)
def test_the_fused_kernel_is_told_everything_about_the_head(kind: str) -> None:
    workload = workload_of(MODELS[kind])
    model = living(workload)
    loss, gradients = step(workload, {"loss": "fused"}, copy.deepcopy(model))
    own, expected = step(workload, {}, model)
    assert loss == pytest.approx(own, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("liger_on_the_cpu")
def test_a_head_that_is_more_than_a_linear_layer_is_not_fused() -> None:
    with pytest.raises(RefusedError, match=r"a bare linear layer; use chunked"):
        build(tiny.llama_workload(), {"loss": "fused", **HEAD_LORA}, tiny.CPU)


def pending(*steps: tuple[Any, float | None]) -> Pending:
    arguments = [Step(function, () if value is None else (value,), {}) for function, value in steps]
    return Pending(Deferral(nn.Linear(4, 4)), torch.zeros(2, 4), tuple(arguments))


def test_scale_and_soft_cap_are_read_from_what_the_model_did() -> None:
    div, mul, tanh = torch.Tensor.div, torch.Tensor.mul, torch.tanh
    assert scale_and_cap(pending()) == (1.0, None)
    assert scale_and_cap(pending((torch.Tensor.float, None), (mul, 0.5))) == (0.5, None)
    assert scale_and_cap(pending((div, 30.0), (tanh, None), (mul, 30.0))) == (1.0, 30.0)
    assert scale_and_cap(pending((div, 4.0), (div, 30.0), (tanh, None), (mul, 30.0))) == (
        0.25,
        30.0,
    )
    for steps in [
        ((tanh, None),),
        ((div, 30.0), (tanh, None), (mul, 20.0)),
        ((torch.Tensor.add, 1.0),),
    ]:
        with pytest.raises(RefusedError, match="between the head and the loss; use chunked"):
            scale_and_cap(pending(*steps))


def test_a_plain_head_is_recognised() -> None:
    head = nn.Linear(4, 4)
    assert is_plain(Deferral(head))
    handle = head.register_forward_pre_hook(lambda *_: None)
    assert not is_plain(Deferral(head))
    handle.remove()
    assert is_plain(Deferral(head))
    assert not is_plain(Deferral(head, wrapped=True))
    head.forward = lambda features: features
    assert not is_plain(Deferral(head))
    del head.forward
    assert not is_plain(Deferral(torch.nn.utils.parametrizations.weight_norm(head)))
    assert not is_plain(Deferral(nn.Conv1d(4, 4, 1)))


@pytest.mark.parametrize("when", ["before", "since"])
def test_a_forward_that_somebody_else_put_on_the_head_counts(when: str) -> None:
    """Its gradient is not the linear layer's."""
    workload = tiny.llama_workload()

    def double(model: Any) -> None:
        inner = model.lm_head.forward
        model.lm_head.forward = lambda hidden: inner(hidden) * 2

    model = living(workload)
    expected = copy.deepcopy(model)
    double(expected)
    batch = workload.batch(4)
    expected(**batch).loss.backward()
    if when == "before":
        double(model)
    with contextlib.closing(build(workload, CHUNKED, tiny.CPU, model=model)) as setup:
        if when == "since":
            inner = model.lm_head.forward
            model.lm_head.forward = lambda hidden: scaled(inner(hidden))
        accumulate(setup, batch)
        if when == "since":
            model.lm_head.forward = inner
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def scaled(logits: torch.Tensor) -> torch.Tensor:
    """The logits, but not their stand-in, doubled."""
    return logits if isinstance(logits, DeferredLogits) else logits * 2


class _Softmax(TorchDispatchMode):
    """Notes of how many tokens there are log-probabilities, or gradients of logits, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_log_softmax" in str(func):
            self.rows.append(len(result))
        return result


def watched(setup: Setup) -> tuple[float, list[int], list[int]]:
    """The loss, of how many tokens the head made logits at a time, and of how many a softmax was taken."""
    made: list[int] = []

    def note(_: nn.Module, args: Any, logits: torch.Tensor) -> None:
        if not isinstance(logits, DeferredLogits):
            made.append(logits.numel() // logits.shape[-1])

    handle = setup.model.get_output_embeddings().register_forward_hook(note)
    with _Softmax() as softmax:
        loss = float(accumulate(setup, setup.workload.batch(EFFECTIVE_BATCH)))
    handle.remove()
    return loss, made, softmax.rows


def shows(effect: Effect) -> None:
    tokens = EFFECTIVE_BATCH * 16
    own, *whole = watched(effect.off)
    loss, *parts = watched(effect.setup)
    assert loss == pytest.approx(own, rel=1e-5)
    assert whole == [[tokens], [tokens] * 2]  # in the forward and in the backward
    assert parts == [[tokens // 8] * 8, [tokens // 8] * 16]


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["chunked", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["llama", "tied", "gemma2, soft-capped", "granite, scaled"])
def test_on_a_gpu_it_trains_as_the_standard_loss(kind: str, precision: str, value: str) -> None:
    if value == "fused":
        pytest.importorskip(
            "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
        )
    hardware = detect("cuda")
    workload = workload_of(MODELS[kind])
    losses = {}
    for each in ("standard", value):
        knobs = {"loss": each, "precision": precision}
        with contextlib.closing(build(workload, knobs, hardware, model=living(workload))) as setup:
            losses[each] = [float(train_step(setup, workload.batch(4))) for _ in range(3)]
    assert losses[value] == pytest.approx(
        losses["standard"], rel=1e-3 if precision == "fp32" else 1e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["chunked", "fused"])
def test_on_a_gpu_the_logits_are_never_there(value: str) -> None:
    if value == "fused":
        pytest.importorskip(
            "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
        )
    hardware = detect("cuda")
    config = tiny.LLAMA | {
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 1,
    }
    model = HuggingFaceModel("tiny", "causal-lm", config, {"kind": "directory", "path": "tiny"})
    workload = huggingface_workload(model, sequence_length=1024, effective_batch_size=4)
    peaks = {}
    for each in ("standard", value):
        with contextlib.closing(build(workload, {"loss": each}, hardware)) as setup:
            accumulate(setup, workload.batch(4))
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            accumulate(setup, workload.batch(4))
            peaks[each] = torch.cuda.max_memory_allocated() - before
    logits = 4 * 1024 * 32_000 * 4
    assert peaks["standard"] > 2 * logits
    assert peaks[value] < logits


@given(
    tokens=st.integers(0, 20_000), features=st.integers(1, 4096), vocabulary=st.integers(2, 200_000)
)
def test_slices_hold_every_token_once_and_are_never_none(
    tokens: int, features: int, vocabulary: int
) -> None:
    parts = list(token_slices(tokens, features, vocabulary))
    assert [place for part in parts for place in range(tokens)[part]] == list(range(tokens))
    assert parts
