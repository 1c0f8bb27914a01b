"""activation_checkpointing: which models it can be applied to, and what it leaves behind."""

from dataclasses import replace

import pytest
import tiny
import torch
from contract import Effect
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.workload import Traits, Workload
from autofit.setup.blocks import repeated_blocks
from autofit.techniques import refuse, settle, technique_named
from autofit.training.build import build
from autofit.training.loop import accumulate

FULL = {"activation_checkpointing": "full"}
NO_BLOCKS = Traits(parameters=1, blocks=0, linears=1, attention=False, sdpa=False, batch_norm=False, dropout=False)


def flat_workload() -> Workload:
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(48, 10), nn.ReLU()),
        batch=tiny.mlp_workload().batch,
        loss=tiny.classify,
        effective_batch_size=4,
    )


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"the model has no repeated blocks .* to checkpoint; use none"):
        build(flat_workload(), FULL, tiny.CPU)


def test_and_before_it_is_built_when_its_traits_are_known() -> None:
    workload = replace(flat_workload(), traits=NO_BLOCKS)
    config = settle(FULL, workload, tiny.CPU)
    assert refuse(config, workload, tiny.CPU).startswith("activation_checkpointing: the model has no repeated blocks")
    assert refuse(config.replace(activation_checkpointing="none"), workload, tiny.CPU) is None


def test_dropout_draws_the_same_numbers_when_it_is_computed_again() -> None:
    def gradients(value: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.Transformer()
        for block in model.blocks:
            block.mlp.append(nn.Dropout(0.5))
        setup = build(tiny.transformer_workload(), {"activation_checkpointing": value}, tiny.CPU, model=model)
        torch.manual_seed(1)
        accumulate(setup, setup.workload.batch(4))
        return [parameter.grad for parameter in model.parameters()]

    for full, plain in zip(gradients("full"), gradients("none"), strict=True):
        torch.testing.assert_close(full, plain)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_count_every_sample_once(momentum: float | None) -> None:
    def buffers(value: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.ConvNet(norm=lambda width: nn.BatchNorm2d(width, momentum=momentum))
        workload = tiny.conv_workload(4)
        setup = build(workload, {"activation_checkpointing": value, "micro_batch_size": 2}, tiny.CPU, model=model)
        accumulate(setup, workload.batch(4))
        setup.close()
        return dict(model.named_buffers())

    torch.testing.assert_close(buffers("full"), buffers("none"))


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


def test_a_cache_that_a_generation_would_use_is_off_for_the_run_only() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    model.config.use_cache = True
    setup = build(workload, FULL, tiny.CPU, model=model)
    assert model.config.use_cache is False
    setup.close()
    assert model.config.use_cache is True


def test_its_order() -> None:
    technique = technique_named("activation_checkpointing")
    assert technique.memory_order("full") < technique.memory_order("none")


def test_blocks_of_a_convolutional_network_are_found() -> None:
    assert len(repeated_blocks(tiny.ConvNet())) == 3


def shows(effect: Effect) -> None:
    for setup, trace, times in ((effect.setup, effect.trace, 2), (effect.off, effect.off_trace, 1)):
        blocks = repeated_blocks(setup.model)
        assert len(blocks) >= 2
        assert [trace.calls[next(block.children())] for block in blocks] == [times] * len(blocks)
        assert [trace.calls[block] for block in blocks] == [1] * len(blocks)
    assert effect.trace.peak_bytes < effect.off_trace.peak_bytes
