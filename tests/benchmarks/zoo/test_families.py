"""Every family of transformers with a training task has a row, and what is written of it can be resolved."""

from pathlib import Path

import pytest

from autofit.models import resolve
from benchmarks.zoo import families
from benchmarks.zoo.families import of_transformers, written


def test_each_family_of_transformers_has_the_task_it_is_most_used_for() -> None:
    found = of_transformers()
    tasks = {each.name: each.task for each in reversed(found)}
    assert len(tasks) >= 150
    assert tasks["llama"] == "causal-lm"
    assert tasks["t5"] == "seq2seq"
    assert tasks["bert"] == "masked-lm"
    assert tasks["wav2vec2"] == "ctc"
    assert tasks["whisper"] == "speech-seq2seq"
    assert {each.task for each in found if each.name == "bert"} >= {
        "masked-lm",
        "token-classification",
        "embed",
    }
    assert len({each.key for each in found}) == len(found)


def test_plain_networks_are_functions_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "LIBRARIES", ("timm", "diffusers"))
    found, lacking = families.families()
    plain = [each for each in found if each.library.startswith("plain/")]
    assert {"lstm", "gan", "dpo", "message_passing"} <= {each.name for each in plain}
    model, options = written(next(each for each in plain if each.name == "lstm"), tmp_path)
    assert resolve(model, **options).name == "sequences.lstm"
    installed = {each.library for each in found} & set(families.LIBRARIES)
    assert len(lacking) + len(installed) == len(families.LIBRARIES)
    assert all("is left out" in line for line in lacking)


def test_a_directory_with_a_config_stands_for_a_family(tmp_path: Path) -> None:
    family = next(
        each for each in of_transformers() if each.name == "llama" and each.task == "causal-lm"
    )
    model, options = written(family, tmp_path)
    assert Path(model).name == "llama"
    assert options == {"effective_batch_size": 4, "sequence_length": 32}
    assert resolve(model, **options).task == "causal-lm"


def test_what_cannot_be_built_is_told_from_what_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.zoo.shrink.overrides", lambda: {"llama": {"num_attention_heads": 7}}
    )
    with pytest.raises(families.NotBuiltError, match="7"):
        written(families.Family("transformers", "llama", "causal-lm", "LlamaForCausalLM"), tmp_path)


@pytest.mark.parametrize(
    ("name", "task", "architecture", "why"),
    [
        (
            "pp_doclayout_v3",
            "object-detection",
            "PPDocLayoutV3ForObjectDetection",
            "refuses labels",
        ),
        (
            "pp_ocrv5_server_det",
            "object-detection",
            "PPOCRV5ServerDetForObjectDetection",
            "takes no labels",
        ),
        ("musicgen", "causal-lm", "MusicgenForCausalLM", "the config of a part"),
    ],
)
def test_what_transformers_does_not_train_is_no_family_that_fails(
    name: str, task: str, architecture: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(families.NotBuiltError, match=why):
        written(families.Family("transformers", name, task, architecture), tmp_path)
