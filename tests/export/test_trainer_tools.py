"""What tools that are built on Trainer share."""

from autofit.export.tool import Request
from autofit.export.trainer_tools import arguments, batches_fit, lora_alpha, trainer_case, unknown
from tests.export.found import found


def request(**knobs: object) -> Request:
    return Request(found(**knobs), "1.0")


def test_off_is_written_out() -> None:
    assert arguments("compile")(request()).keys == {"torch_compile": False}
    assert arguments("compile")(request(compile="default")).keys["torch_compile"] is True


def test_flash_attn_is_where_it_was_when_this_was_measured() -> None:
    assert not trainer_case(request()).flash_attn
    with_it = found("cuda", "causal-lm", {"versions": {"flash-attn": "2.8"}})
    assert trainer_case(Request(with_it, "1.0")).flash_attn


def test_batches_that_contradict_are_told() -> None:
    assert batches_fit(found()) is None
    assert "is not the effective batch of 16" in str(
        batches_fit(found("cuda", "causal-lm", {"effective_batch_size": 16}))
    )


def test_alpha_is_twice_the_rank_unless_it_is_set() -> None:
    assert lora_alpha(request(lora_rank=8)) == 16
    assert lora_alpha(request(lora_rank=8, lora_alpha=3.5)) == 3.5


def test_what_a_tool_has_nothing_for_departs_when_it_is_on() -> None:
    share = unknown("kernels", "it has none", may_not_fit=False)
    assert not share(request()).departures
    (departure,) = share(request(kernels="liger")).departures
    assert not departure.may_not_fit
