"""Tasks: found by their names, and by those of classes."""

import pytest

from autofit.core.tasks import TASK_NAMES, task_named, task_of, task_of_class
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.custom import CUSTOM


def test_a_name_that_is_not_known_is_of_whatever_it_may_be() -> None:
    assert [task_named(name).name for name in TASK_NAMES] == list(TASK_NAMES)
    assert task_named("chess") is task_named(None) is task_named(["causal-lm"]) is CUSTOM


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("LlamaForCausalLM", "causal-lm"),
        ("GPT2LMHeadModel", "causal-lm"),
        ("BertForMaskedLM", "masked-lm"),
        ("BertForPreTraining", "custom"),  # it has another loss, too
        ("ViTForImageClassification", "image-classification"),
        ("Wav2Vec2ForCTC", "ctc"),
        ("BartForConditionalGeneration", "custom"),
        ("BertModel", "custom"),
    ],
)
def test_the_end_of_a_classs_name_tells_its_task(name: str, task: str) -> None:
    assert task_of_class(name).name == task


def test_an_adapted_model_is_of_the_task_of_what_it_adapts() -> None:
    class TinyForCausalLM:
        pass

    class PeftModel:
        peft_config = None

        def get_base_model(self) -> TinyForCausalLM:
            return TinyForCausalLM()

    assert task_of(PeftModel()) is task_of(TinyForCausalLM()) is CAUSAL_LM
    assert task_of(object()) is CUSTOM
