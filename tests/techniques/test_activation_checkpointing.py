"""activation_checkpointing: which models it can be applied to, what it keeps, and what it leaves behind."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

from autofit.core.config import Value
from autofit.core.errors import InputError, RefusedError
from autofit.core.workload import Traits, Workload
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.techniques.activation_checkpointing import _policy
from autofit.training.build import build
from autofit.training.loss import loss_and_count
from autofit.training.step import accumulate
from tests import tiny
from tests.techniques.contract import Effect

FULL = {"activation_checkpointing": "full"}
BUDGETS = ["budget-0.25", "budget-0.5", "budget-0.75"]
every_wrapper = pytest.mark.parametrize("value", ["selective", "alternate", "full"])
with_and_without_compile = pytest.mark.parametrize("compiler", ["none", "default"])
UNCUT: dict[type[nn.Module], int] = {}
NO_BLOCKS = Traits(
    parameters=1, blocks=0, linears=1, attention=False, sdpa=False, batch_norm=False, dropout=False
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Two runs of one class would share their compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def beside(value: Value) -> dict[str, Value]:
    return {"compile": "default"} if value in BUDGETS else {}


def flat_workload() -> Workload:
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(48, 10), nn.ReLU()),
        batch=tiny.mlp_workload().batch,
        loss=tiny.classify,
        effective_batch_size=4,
    )


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(
        RefusedError, match=r"the model has no repeated blocks .* to checkpoint; use none"
    ):
        build(flat_workload(), FULL, tiny.CPU)


def test_and_before_it_is_built_when_its_traits_are_known() -> None:
    workload = replace(flat_workload(), traits=NO_BLOCKS)
    config = canonicalize(FULL, workload, tiny.CPU)
    assert refuse(config, workload, tiny.CPU).startswith(
        "activation_checkpointing: the model has no repeated blocks"
    )
    assert refuse(config.replace(activation_checkpointing="none"), workload, tiny.CPU) is None


@with_and_without_compile
@every_wrapper
def test_dropout_draws_the_same_numbers_when_it_is_computed_again(
    value: str, compiler: str
) -> None:
    plain = gradients_with_dropout("none", compiler)
    for again, expected in zip(gradients_with_dropout(value, compiler), plain, strict=True):
        torch.testing.assert_close(again, expected)


@functools.cache
def gradients_with_dropout(value: str, compiler: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = tiny.Transformer(depth=2)
    for block in model.blocks:
        block.mlp.append(nn.Dropout(0.5))
    config = {"activation_checkpointing": value, "compile": compiler}
    setup = build(tiny.transformer_workload(), config, tiny.CPU, model=model)
    torch.manual_seed(1)
    accumulate(setup, setup.workload.batch(4))
    setup.close()
    return [parameter.grad for parameter in model.parameters()]


@with_and_without_compile
@every_wrapper
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_count_every_sample_once(
    momentum: float | None, value: str, compiler: str
) -> None:
    def buffers(**knobs: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.ConvNet(norm=lambda width: nn.BatchNorm2d(width, momentum=momentum))
        workload = tiny.conv_workload(4)
        setup = build(workload, {"micro_batch_size": 2, **knobs}, tiny.CPU, model=model)
        accumulate(setup, workload.batch(4))
        setup.close()
        return dict(model.named_buffers())

    torch.testing.assert_close(buffers(activation_checkpointing=value, compile=compiler), buffers())


@pytest.mark.parametrize(("value", "graphs"), [("full", 1), ("selective", 1), ("alternate", 2)])
def test_checkpointed_blocks_share_their_compiled_code_too(value: str, graphs: int) -> None:
    for workload in (tiny.llama_workload(4, num_hidden_layers=6), tiny.conv_workload(4)):
        torch._dynamo.reset()
        counters.clear()
        setup = build(workload, {"activation_checkpointing": value, "compile": "default"}, tiny.CPU)
        accumulate(setup, workload.batch(4))
        assert counters["stats"]["unique_graphs"] == graphs
        assert not counters["graph_break"]
        setup.close()


def test_selective_keeps_products_convolutions_and_every_form_of_attention() -> None:
    aten = torch.ops.aten
    kept = (
        *(
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten.baddbmm.default,
            aten.convolution.default,
        ),
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    )
    again = (
        aten.add.Tensor,
        aten.gelu.default,
        aten.native_layer_norm.default,
        aten._softmax.default,
        aten.t.default,
    )
    assert {_policy(None, operator) for operator in kept} == {CheckpointPolicy.MUST_SAVE}
    assert {_policy(None, operator) for operator in again} == {CheckpointPolicy.PREFER_RECOMPUTE}


def test_selective_refuses_a_model_that_changes_what_is_kept() -> None:
    model = tiny.MLP()
    for layer in model.layers:
        layer[1] = nn.ReLU(inplace=True)
    setup = build(
        tiny.mlp_workload(), {"activation_checkpointing": "selective"}, tiny.CPU, model=model
    )
    with pytest.raises(
        RefusedError, match=r"in place .* Use activation_checkpointing full or alternate\.$"
    ):
        accumulate(setup, setup.workload.batch(4))


@pytest.mark.parametrize(
    ("depth", "wrapped"), [(2, [True, False]), (5, [False, True, False, True, False])]
)
def test_alternate_wraps_every_second_block_and_never_the_last(
    depth: int, wrapped: list[bool]
) -> None:
    model = tiny.Transformer(depth=depth)
    build(
        tiny.transformer_workload(),
        {"activation_checkpointing": "alternate"},
        tiny.CPU,
        model=model,
    )
    assert ["forward" in block.__dict__ for block in model.blocks] == wrapped


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("full:2", ["full", "full", "none", "none"]),
        ("full:3+selective", ["full", "full", "full", "selective"]),
    ],
)
def test_a_number_of_blocks_is_the_first_ones_and_the_rest_is_as_said(
    value: str, kept: list[str]
) -> None:
    workload = tiny.transformer_workload()

    def saved(value: str) -> float:
        config = {"activation_checkpointing": value}
        return kept_bytes(build(workload, config, tiny.CPU, model=tiny.Transformer(depth=4)))

    share = {one: saved(one) / 4 for one in set(kept)}
    assert saved(value) == pytest.approx(sum(share[one] for one in kept), rel=0.02)

    model = tiny.Transformer(depth=4)
    build(workload, {"activation_checkpointing": value}, tiny.CPU, model=model)
    wrapped = ["forward" in block.__dict__ for block in model.blocks]
    assert wrapped == [one != "none" for one in kept]


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("full:0", "none"),
        ("full:0+selective", "selective"),
        ("full:3", "full:3"),
        ("full:03+selective", "full:3+selective"),
        ("full:4", "full"),
        ("full:9+selective", "full"),
    ],
)
def test_no_block_and_all_of_them_are_the_words_for_that(given: str, canonical: str) -> None:
    workload = replace(tiny.transformer_workload(), traits=replace(NO_BLOCKS, blocks=4))
    config = canonicalize({"activation_checkpointing": given}, workload, tiny.CPU)
    assert config.activation_checkpointing == canonical


@pytest.mark.parametrize("value", ["full:", "full:-1", "full:1.5", "alternate:2", "full:2+full"])
def test_other_words_are_refused_with_what_it_takes(value: str) -> None:
    with pytest.raises(InputError, match=r"It takes none, selective, .* full:N for the first N"):
        canonicalize({"activation_checkpointing": value}, tiny.transformer_workload(), tiny.CPU)


@pytest.mark.parametrize("value", BUDGETS)
def test_a_budget_is_the_compilers_alone_to_keep(value: str) -> None:
    workload = tiny.transformer_workload()
    reason = refuse(
        canonicalize({"activation_checkpointing": value}, workload, tiny.CPU), workload, tiny.CPU
    )
    assert (
        reason
        == f"activation_checkpointing: {value} is chosen by the compiler; set compile default."
    )
    setup = build(
        flat_workload(), {"activation_checkpointing": value, "compile": "default"}, tiny.CPU
    )
    assert accumulate(setup, setup.workload.batch(4)).isfinite()  # it needs no blocks
    with setup.step_context():
        assert torch._functorch.config.activation_memory_budget == float(
            value.removeprefix("budget-")
        )
    assert torch._functorch.config.activation_memory_budget == 1.0
    setup.close()


@pytest.mark.parametrize(
    ("traits", "knobs"),
    [(replace(NO_BLOCKS, dropout=True), {}), (None, {"lora_rank": 4, "lora_dropout": 0.1})],
    ids=["the model's", "the adapters'"],
)
def test_a_budget_is_refused_beside_dropout(traits: Traits | None, knobs: dict[str, Value]) -> None:
    workload = replace(tiny.transformer_workload(), traits=traits)
    config = canonicalize(
        {"activation_checkpointing": "budget-0.5", "compile": "default", **knobs},
        workload,
        tiny.CPU,
    )
    reason = refuse(config, workload, tiny.CPU)
    assert reason and "different random numbers" in reason
    assert reason.endswith("; use full, alternate or selective.")


def test_a_budget_is_refused_beside_updates_that_draw_in_the_backward() -> None:
    workload = tiny.llama_workload()
    knobs: dict[str, Value] = {
        "activation_checkpointing": "budget-0.5",
        "compile": "default",
        "precision": "bf16",
    }
    knobs |= {"optimizer": "adamw-8bit-sr", "optimizer_in_backward": True}
    technique = technique_named("activation_checkpointing")
    given = technique.refuse(canonicalize(knobs, workload, tiny.CPU), workload, tiny.CPU)
    assert (
        given
        == "adamw-8bit-sr draws random numbers, and would in the backward; use full, alternate or selective."
    )


def test_and_beside_dropout_that_only_the_generator_tells_of() -> None:
    class Dropping(tiny.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().forward(x), 0.5)

    model = tiny.Transformer()
    model.blocks = nn.ModuleList(Dropping(32) for _ in range(2))
    config = {"activation_checkpointing": "budget-0.5", "compile": "default"}
    setup = build(tiny.transformer_workload(), config, tiny.CPU, model=model)
    with pytest.raises(RefusedError, match="different random numbers in backward"):
        accumulate(setup, setup.workload.batch(4))
    setup.close()


def test_a_block_that_stands_there_several_times_is_wrapped_once_and_given_back() -> None:
    model = tiny.Transformer(depth=1)
    block = model.blocks[0]
    model.blocks.extend([block, block])
    calls: list[int] = []
    block.norm1.register_forward_hook(lambda *_: calls.append(1))
    setup = build(tiny.transformer_workload(), FULL, tiny.CPU, model=model)
    accumulate(setup, setup.workload.batch(4))
    assert len(calls) == 2 * 3
    setup.close()
    assert "forward" not in block.__dict__


def test_a_forward_that_somebody_else_put_on_the_instance_comes_back() -> None:
    model = tiny.Transformer()
    block = model.blocks[0]
    theirs = block.forward = lambda x, inner=block.forward: inner(x) * 2
    setup = build(tiny.transformer_workload(), FULL, tiny.CPU, model=model)
    assert block.forward is not theirs
    setup.close()
    assert block.forward is theirs
    assert all("forward" not in each.__dict__ for each in model.blocks[1:])


def test_its_order() -> None:
    technique = technique_named("activation_checkpointing")
    assert technique.memory_order("full") < technique.memory_order("none")
    assert {technique.memory_order(value) for value in ("alternate", "selective", *BUDGETS)} == {
        None
    }


def test_blocks_of_a_convolutional_network_are_found() -> None:
    assert len(repeated_blocks(tiny.ConvNet())) == 3


def kept_bytes(setup: Setup) -> int:
    """Storage that the forward leaves for the backward, under the tracker: nothing is compiled."""
    batch = setup.workload.batch(4)
    with StorageTracker() as tracker:
        tracker.see([*setup.model.parameters(), *setup.model.buffers()])
        tracker.see(list(batch.values()))
        before = tracker.live
        with setup.step_context(), setup.forward_context():
            loss, _ = loss_and_count(setup, batch)
        kept = tracker.live - before
        loss.backward()
    return kept


def kept_by_compiled_code(setup: Setup) -> int:
    """The same of compiled code, counted where autograd keeps it."""
    held = {
        tensor.untyped_storage()._cdata
        for tensor in (*setup.model.parameters(), *setup.model.buffers())
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        setup.step_context(),
    ):
        loss_and_count(setup, setup.workload.batch(4))[0].backward()
    return sum(storage.nbytes() for key, storage in kept.items() if key not in held)


def uncut(kind: type[nn.Module], off: Setup) -> int:
    """What compiled code keeps without a budget, the same for every run of a kind of model."""
    if kind not in UNCUT:
        torch._dynamo.reset()
        UNCUT[kind] = kept_by_compiled_code(off)
    return UNCUT[kind]


def bytes_of_a_block(model: nn.Module, samples: int = 4) -> dict[str, int]:
    """What one block of the contract's models keeps for its backward, counted by hand in fp32.

    Both have 32 features (one `x` each token), 2 heads, and 4 x 32 hidden features. `sums` are attention's logarithms.
    """
    tokens = samples * (12 if isinstance(model, tiny.Transformer) else 16)
    x, sums = tokens * 32 * 4, tokens * 2 * 4
    if isinstance(model, tiny.Transformer):
        # Into the norms 2, out of them 2 (with mean and deviation), q, k, v and the mix 4, into and out of GELU 8.
        return {
            "none": 16 * x + sums + 4 * tokens * 4,
            "full": x,
            "selective": (1 + 3 + 1 + 1 + 4 + 1) * x + sums,
        }
    # Into the norms 2, normalised 2 (with the factor), scaled 2, q, k, v and the mix 4, gate, SiLU, up, product 16.
    return {
        "none": 26 * x + sums + 2 * tokens * 4,
        "full": x,
        "selective": (1 + 3 + 1 + 1 + 4 + 4 + 1) * x + sums,
    }


def shows(effect: Effect) -> None:
    (shows_share_kept if effect.value in BUDGETS else shows_bytes_kept)(effect)


def shows_bytes_kept(effect: Effect) -> None:
    """Every wrapped block runs twice, and what is not kept is as many bytes as arithmetic says."""
    blocks = repeated_blocks(effect.setup.model)
    wrapped = blocks[len(blocks) % 2 :: 2] if effect.value == "alternate" else blocks
    runs = [effect.trace.calls[next(block.children())] for block in blocks]
    assert runs == [2 if block in wrapped else 1 for block in blocks]
    assert [effect.trace.calls[block] for block in blocks] == [1] * len(blocks)
    assert effect.trace.peak_bytes < effect.off_trace.peak_bytes
    of_block = bytes_of_a_block(effect.setup.model)
    less = of_block["none"] - of_block["selective" if effect.value == "selective" else "full"]
    assert kept_bytes(effect.off) - kept_bytes(effect.setup) == pytest.approx(
        len(wrapped) * less, rel=0.02
    )


def shows_share_kept(effect: Effect) -> None:
    """At most the share asked for of what a block keeps inside, and not much less where tensors are that large."""
    budget = float(effect.value.removeprefix("budget-"))
    kept = kept_by_compiled_code(effect.setup)
    everything = uncut(type(effect.off.model), effect.off)
    of_block = bytes_of_a_block(effect.setup.model)
    inside = len(repeated_blocks(effect.setup.model)) * (of_block["none"] - of_block["full"])
    # The compiler itself leaves out some of what plain code keeps: the share is of what it would keep.
    plain = kept_bytes(effect.off)
    inside -= plain - everything
    share = 1 - (everything - kept) / inside
    assert 0.6 * budget < share < budget + 0.05


@every_wrapper
def test_the_peak_of_a_step_falls_by_what_is_not_kept(value: str) -> None:
    """Where activations are most of the memory: 64 samples, six blocks. The last one's inside is back at the peak."""

    def peak(value: str) -> int:
        model = tiny.Transformer(depth=6)
        setup = build(
            tiny.transformer_workload(64),
            {"activation_checkpointing": value},
            tiny.CPU,
            model=model,
        )
        with StorageTracker() as tracker:
            accumulate(setup, setup.workload.batch(64))
        return tracker.peak

    of_block = bytes_of_a_block(tiny.Transformer(), samples=64)
    less = of_block["none"] - of_block["selective" if value == "selective" else "full"]
    wrapped = 3 if value == "alternate" else 6 - 1
    assert peak("none") - peak(value) == pytest.approx(wrapped * less, rel=0.1)


@pytest.mark.slow
def test_inductor_keeps_the_share_and_the_gradients() -> None:
    def run(value: str) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tiny.Transformer(depth=2)
        config = {"activation_checkpointing": value, "compile": "default"}
        setup = build(tiny.transformer_workload(), config, tiny.CPU, model=model)
        kept = kept_by_compiled_code(setup)
        setup.close()
        return kept, [parameter.grad for parameter in model.parameters()]

    (everything, plain), (kept, gradients) = run("none"), run("budget-0.25")
    of_block = bytes_of_a_block(tiny.Transformer())
    assert everything - kept > 0.6 * 2 * (of_block["none"] - of_block["full"])
    for one, other in zip(gradients, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@every_wrapper
def test_on_a_gpu_less_is_allocated(value: str) -> None:
    hardware = replace(tiny.CPU, device="cuda")

    def peak(value: str) -> int:
        model = tiny.Transformer(width=128, depth=6)
        setup = build(
            tiny.transformer_workload(64),
            {"activation_checkpointing": value},
            hardware,
            model=model,
        )
        accumulate(setup, setup.workload.batch(64))
        setup.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        accumulate(setup, setup.workload.batch(64))
        return torch.cuda.max_memory_allocated()

    assert peak(value) < 0.9 * peak("none")


def test_budgets_are_searched_where_compiling_is() -> None:
    technique = technique_named("activation_checkpointing")
    assert technique.choices(tiny.CPU) == ("none", "selective", "alternate", "full")
    assert technique.choices(replace(tiny.CPU, device="cuda")) == technique.values


@pytest.mark.parametrize("value", ["full", "selective", "alternate"])
def test_a_decoder_beside_an_encoder_caches_nothing_either(value: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
    }

    def model() -> nn.Module:
        torch.manual_seed(0)
        return T5ForConditionalGeneration(
            T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {name: torch.arange(8 * n).view(n, 8) % 64 for name in ("input_ids", "labels")}

    workload = Workload(model=model, batch=batch, effective_batch_size=2)
    plain = accumulate(build(workload, {}, tiny.CPU, model=model()), batch(2))
    living = model()
    setup = build(workload, {"activation_checkpointing": value}, tiny.CPU, model=living)
    torch.testing.assert_close(accumulate(setup, batch(2)), plain)
    setup.close()
    assert living.config.use_cache and living.decoder.config.use_cache


@pytest.mark.parametrize("value", ["full", "selective", "alternate"])
def test_a_model_that_caches_whatever_its_config_says_is_recomputed_without(value: str) -> None:
    from transformers import DynamicCache, EncoderDecoderCache, XLMConfig, XLMWithLMHeadModel

    config = XLMConfig(
        vocab_size=64, emb_dim=32, n_layers=3, n_heads=2, dropout=0.0, attention_dropout=0.0
    )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return XLMWithLMHeadModel(config)

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {name: torch.arange(8 * n).view(n, 8) % 64 for name in ("input_ids", "labels")}

    workload = Workload(model=model, batch=batch, effective_batch_size=2)
    plain = accumulate(build(workload, {}, tiny.CPU, model=model()), batch(2))
    setup = build(workload, {"activation_checkpointing": value}, tiny.CPU, model=model())
    torch.testing.assert_close(accumulate(setup, batch(2)), plain)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    with torch.no_grad():  # as a generation within the run
        setup.model.transformer(batch(2)["input_ids"], cache=cache)
    assert cache.get_seq_length() == 8
    setup.close()
