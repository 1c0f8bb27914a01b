"""Keys that several tools share."""

from autofit.export.shared_keys import lora_alpha, missing, whole_alpha
from autofit.export.tool import Request
from tests.export.sources import source


def request(**knobs: object) -> Request:
    return Request(source(**knobs), "1.0")


def test_alpha_is_twice_the_rank_unless_it_is_set() -> None:
    share = lora_alpha("alpha", float)
    assert share(request(lora_rank=8)).keys == {"alpha": 16.0}
    assert share(request(lora_rank=8, lora_alpha=3.5)).keys == {"alpha": 3.5}


def test_an_alpha_that_is_rounded_is_a_deviation() -> None:
    share = whole_alpha("Tool")
    assert share(request(lora_rank=8)) == request(lora_rank=8).keys("lora_alpha", {"lora_alpha": 16})
    (deviation,) = share(request(lora_rank=8, lora_alpha=3.4)).deviations
    assert str(deviation) == "lora_alpha 3.4: Tool takes whole numbers, here 3."


def test_a_knob_that_a_tool_has_nothing_for_is_a_deviation_when_it_is_on() -> None:
    share = missing("Tool", "kernels", may_not_fit=False)["kernels"]
    assert not share(request()).deviations
    (deviation,) = share(request(kernels="liger")).deviations
    assert str(deviation) == "kernels liger: Tool has none of Liger's, and keeps more for the backward."
    assert not deviation.may_not_fit
