"""The header of train.py and of exports: what was measured, where and with what, and how a tool deviates."""

from autofit.core.hardware import GIB
from autofit.export.header import export_header, measured_sentence, script_header
from autofit.export.source import Deviation
from tests.export.sources import MEASURED, source

HARDWARE = {"device": "cuda", "name": "NVIDIA H200", "budget_gib": 24.0}
VERSIONS = {"autofit": "0.1.0", "torch": "2.13.0", "optuna": "5.0.0"}


def joined(text: str) -> str:
    return " ".join(text.split())


def test_all_figures_are_named_with_their_units() -> None:
    text = joined(
        script_header(
            measured_sentence(HARDWARE, MEASURED), VERSIONS, ["torch", "transformers"], ()
        )
    )
    assert (
        "Measured on NVIDIA H200, within 24 GiB and verified in longer runs: 5,120 tokens per second"
        in text
    )
    assert "3.2 s per optimizer step (3.1 to 3.3), peak memory 21.6 GiB" in text
    assert "optuna" not in text
    assert "It needs torch 2.13.0 and transformers (autofit 0.1.0)." in text


def test_communication_that_was_predicted_is_called_so() -> None:
    measured = {
        "tokens_per_second": 2010.4,
        "predicted_communication_seconds": 0.0123,
        "verified": False,
    }
    text = measured_sentence(HARDWARE, measured, world=8)
    assert "Rank 0 alone was measured, of a training on 8 x NVIDIA H200" in text
    assert "; 0.012 s of communication a step are predicted: 2,010 tokens per second." in text


def test_an_unmeasured_config_is_not_presented_as_measured() -> None:
    text = measured_sentence(HARDWARE, None)
    assert "it was not measured" in text
    assert "Measured on" not in text


def test_predicted_figures_are_called_predicted() -> None:
    predicted = {
        "tokens_per_second": 2010.4,
        "step_seconds": 32.6,
        "device_bytes": {"low": 10 * GIB, "high": int(11.5 * GIB)},
    }
    text = measured_sentence(HARDWARE, None, predicted)
    assert (
        "Nothing of it was measured. Predicted on NVIDIA H200, within 24 GiB: 2,010 tokens per second"
        in text
    )
    assert "32.6 s per optimizer step, peak memory 10 to 11.5 GiB." in text


def test_speed_of_one_card_for_the_memory_of_another_says_both() -> None:
    hardware = {**HARDWARE, "name": "RTX 4090", "measured_on": "NVIDIA H200"}
    text = measured_sentence(hardware, MEASURED)
    assert "Measured on NVIDIA H200, for RTX 4090, within 24 GiB" in text


def test_memory_on_cpu_is_what_tensors_take() -> None:
    measured = {
        **MEASURED,
        "tokens_per_second": None,
        "peak_gib": {"allocated": 1.5, "reserved": None, "device": None},
    }
    text = measured_sentence({"device": "cpu", "name": "x"}, measured)
    assert "2.5 samples per second" in text
    assert "peak memory 1.5 GiB" in text


def test_changes_of_one_knob_are_listed() -> None:
    changes = ["attention eager: 0.90 x the speed", "micro_batch_size 8: out of memory"]
    text = script_header("Measured.", VERSIONS, ["torch"], changes)
    assert (
        "changed:\n    attention eager: 0.90 x the speed\n    micro_batch_size 8: out of memory\n\n"
        in text
    )
    assert "changed" not in script_header("Measured.", VERSIONS, ["torch"], ())


def joined_export(*deviations: Deviation, loss: str = "standard", **others: object) -> str:
    given = source("cuda", "causal-lm", others or None, loss=loss)
    return joined(
        "\n".join(export_header("Tool 1.0", given, deviations=deviations, run="tool run"))
    )


def test_an_export_names_the_work_and_the_loss() -> None:
    text = joined_export()
    assert "with the keys of Tool 1.0, by autofit 0.1.0." in text
    assert "The work: causal-lm, 8 samples per optimizer step, 2048 tokens per sample." in text
    assert "The loss: the model's own, with the logits of all tokens in memory." in text
    assert "The loss: chunked, which never holds the logits of all tokens." in joined_export(
        loss="chunked"
    )
    assert text.endswith("tool run")


def test_an_export_names_the_data_of_the_search_and_what_is_learnt() -> None:
    given = source(others={"data": "/data/chats.jsonl", "form": "messages"})
    text = joined(
        "\n".join(export_header("axolotl 0.19.0", given, deviations=(), run="axolotl train x"))
    )
    assert "The data: /data/chats.jsonl, of which the assistant's turns are learnt." in text


def test_an_export_lists_deviations_or_says_that_there_are_none() -> None:
    assert "The keys below cover every knob of the measured config." in joined_export()
    deviations = (
        Deviation("compile", "default", "it does not", may_not_fit=True),
        Deviation("loss", "fused", "x"),
    )
    text = joined_export(*deviations)
    assert "- compile default: it does not. It may no longer fit. - loss fused: x." in text


def test_an_export_of_an_unmeasured_config_does_not_say_measured() -> None:
    text = joined_export(measured=None, versions={})
    assert "it was not measured" in text
    assert "Measured with" not in text


def test_lines_stay_comments() -> None:
    lines = export_header(
        "Tool 1.0", source(), deviations=[Deviation("x", "y", "a\nb " * 60)], run="run"
    )
    assert all("\n" not in line and len(line) <= 104 for line in lines)


def test_an_export_for_a_card_says_how_memory_was_reserved() -> None:
    assert (
        "Memory: measured under PYTORCH_ALLOC_CONF=expandable_segments:True, to be set in"
        in joined_export()
    )
    card = {"device": "cuda", "name": "a card", "allocator": "expandable_segments:False"}
    assert "PYTORCH_ALLOC_CONF=expandable_segments:False" in joined_export(hardware=card)
    on_cpu = export_header("Tool 1.0", source("cpu"), deviations=(), run="run")
    assert "PYTORCH_ALLOC_CONF" not in " ".join(on_cpu)
