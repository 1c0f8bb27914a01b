"""Keys that several tools share."""

import pytest
import torch

from autofit.export.shared_keys import (
    arguments,
    lora_alpha,
    missing,
    optimizer_class,
    trainer_case,
    whole_alpha,
)
from autofit.export.tool import Request, ToolKeys
from tests.export.sources import source


def request(**knobs: object) -> Request:
    return Request(source(**knobs), "1.0", "Tool")


def test_alpha_is_32_unless_it_is_set() -> None:
    assert lora_alpha(request(lora_rank=8), "alpha").keys == {"alpha": 32}
    assert lora_alpha(request(lora_rank=8, lora_alpha=3.5), "alpha").keys == {"alpha": 3.5}


def test_an_alpha_that_is_rounded_is_a_deviation() -> None:
    assert whole_alpha(request(lora_rank=8)) == ToolKeys({"lora_alpha": 32})
    (deviation,) = whole_alpha(request(lora_rank=8, lora_alpha=3.4)).deviations
    assert str(deviation) == "lora_alpha 3.4: Tool takes whole numbers, here 3."


def test_a_knob_that_a_tool_has_nothing_for_is_a_deviation_when_it_is_on() -> None:
    share = missing("Tool", "kernels", may_not_fit=False)["kernels"]
    assert not share(request()).deviations
    (deviation,) = share(request(kernels="liger")).deviations
    assert (
        str(deviation)
        == "kernels liger: Tool has none of Liger's, and keeps more for the backward."
    )
    assert not deviation.may_not_fit


def test_off_is_written_out() -> None:
    assert arguments(request(), "compile").keys == {"torch_compile": False}
    assert arguments(request(compile="default"), "compile").keys["torch_compile"] is True


def test_flash_attn_is_there_if_it_was_when_this_was_measured() -> None:
    assert not trainer_case(source()).flash_attn
    assert trainer_case(source("cuda", "causal-lm", {"versions": {"flash-attn": "2.8"}})).flash_attn


def test_a_step_of_adafactor_is_as_long_as_that_of_adamw() -> None:
    """Not a thousandth of it, as with torch's own eps."""
    keys = optimizer_class(request(optimizer="adafactor"), "class", "options").keys
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    options = {
        name.removeprefix("options."): value for name, value in keys.items() if name != "class"
    }
    optimizer = torch.optim.Adafactor([weight], **options)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert weight.detach().abs().mean().item() == pytest.approx(options["lr"], rel=0.01)
