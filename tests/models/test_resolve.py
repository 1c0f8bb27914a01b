"""resolve finds out what a name means, and a source leads back to the same workload."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.core.strict_yaml import dump, parse
from autofit.core.workload import Workload
from autofit.models import model_names, resolve, workload_from_source
from autofit.models.losses import DPO

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
FLOW = """
from autofit.core.workload import Workload
def make(): return Workload(model=lambda: None, batch=lambda n: n)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A current directory with a model, a folder that bears a preset's name, and a file with a function."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("model", "organisation/model"):
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text(json.dumps(CONFIG))
    Path("gpt2").mkdir()
    Path("flow.py").write_text(FLOW)


def refusal(model: str, **options: object) -> str:
    with pytest.raises(InputError) as caught:
        resolve(model, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        ("tiny-llama", "preset", "tiny-llama"),
        ("gpt2", "preset", "gpt2"),  # an empty folder of that name does not hide it
        ("model", "directory", "model"),
        ("./model", "directory", "model"),
        ("organisation/model", "directory", "model"),  # what is there goes before the hub
        ("flow.py:make", "function", "flow.make"),
    ],
)
def test_what_a_name_means(model: str, kind: str, name: str) -> None:
    workload = resolve(model)
    assert (workload.source["kind"], workload.name) == (kind, name)


def test_a_model_in_a_folder_goes_before_the_preset_of_that_name() -> None:
    Path("gpt2/config.json").write_text(json.dumps(CONFIG))
    assert resolve("gpt2").source["kind"] == "directory"


def test_sizes_are_passed_on() -> None:
    for model in ("tiny-llama", "model"):
        workload = resolve(model, sequence_length=48, effective_batch_size=5)
        assert (workload.sequence_length, workload.effective_batch_size) == (48, 5)
    assert resolve("flow.py:make", effective_batch_size=5).effective_batch_size == 5


@pytest.mark.parametrize("model", ["tiny-llama", "vit-base", "model"])
def test_a_source_survives_yaml_and_leads_back(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(model, effective_batch_size=6)
    source = parse(dump(dict(first.source)), "result.yaml")
    monkeypatch.chdir("/")  # `autofit train` may be run from anywhere
    assert facts(workload_from_source(source, first.summary())) == facts(first)


def test_options_of_the_loss_survive_in_the_source() -> None:
    first = resolve("tiny-llama", task="dpo", loss_options={"kind": "ipo", "beta": 0.2})
    source = parse(dump(dict(first.source)), "result.yaml")
    assert workload_from_source(source, first.summary()).loss == first.loss
    assert first.loss == DPO(kind="ipo", beta=0.2)


FIRST = f"{', '.join(sorted(model_names())[:40])} and {len(model_names()) - 40} others"
OTHERS = "Others: a directory with config.json, a hub id (OWNER/NAME) or file.py:FUNCTION."


def facts(workload: Workload) -> tuple[object, ...]:
    return (workload.name, workload.source, workload.summary(), workload.unit, workload.batch)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt-2", f"unknown model 'gpt-2'. Did you mean 'gpt2'? {OTHERS}"),
        ("", f"unknown model ''. Known: {FIRST}. {OTHERS}"),
        ("llama:7b", f"unknown model 'llama:7b'. Did you mean 'llama-2-7b'? {OTHERS}"),
        ("flow.py", "flow.py is a file, not a model. Write flow.py:FUNCTION."),
        (
            "model/config.json",
            "model/config.json is a file, not a model. Give the directory that holds config.json.",
        ),
        ("./gone", "the directory ./gone is not there. Check the path."),
        ("/no/such/place", "the directory /no/such/place is not there. Check the path."),
        (
            "~nobody-of-that-name/model",
            "the directory ~nobody-of-that-name/model is not there. Check the path.",
        ),
        (
            "x" * 5000,
            f"unknown model '{'x' * 199}.... Known: {FIRST}. {OTHERS}",
        ),
    ],
)
def test_names_that_mean_nothing(model: str, message: str) -> None:
    assert refusal(model) == message


def test_a_hub_id_that_cannot_be_fetched_says_so() -> None:
    assert refusal("nobody/nothing").startswith(
        "nobody/nothing is no directory here, and its config.json cannot be"
    )


def test_a_folder_without_a_config_is_named() -> None:
    Path("empty").mkdir()
    assert "holds no config.json" in refusal("empty")


@pytest.mark.parametrize("size", [0, -1, 2.5, "8"])
@pytest.mark.parametrize("model", ["tiny-llama", "flow.py:make"])
def test_impossible_effective_batches_are_refused(model: str, size: object) -> None:
    assert refusal(model, effective_batch_size=size).startswith(
        f"the effective batch size must be a positive whole number, not {size!r}."
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "this result is of a model that lived in a Python process, and does not say how to make it again. "
             "Train it there, with autofit.fit(model, loader, config=...)."),
        ({"kind": "presets"}, "unknown kind of model source 'presets'. Did you mean 'preset'?"),
        ({"kind": "preset"}, "the source of the model lacks its model: {'kind': 'preset'}. Search again."),
        ({"kind": "directory", "path": 3},
         "the source of the model lacks its path: {'kind': 'directory', 'path': 3}. Search again."),
        ({"kind": "directory", "path": "/gone"}, "the directory /gone is not there. Check the path."),
        ({"kind": "hub", "model": "../../etc"},
         "the source of the model is '../../etc', which is no name of a model on the hub. "
         "Write it as organisation/name, or search again."),
        ({"kind": "hub", "model": ""}, "the source of the model is '', which is no name of a model on the hub. "
         "Write it as organisation/name, or search again."),
        ({"kind": "preset", "model": "gpt-2"}, "unknown model 'gpt-2'. Did you mean 'gpt2'?"),
        ({"kind": "function", "function": "flow.py:make"},
         "this result is of a model that the function flow.py:make makes, and no file has autofit run code. "
         "Give the model in Python: autofit.fit(model, loader, config=...)."),
    ],
)  # fmt: skip
def test_sources_that_lead_nowhere(source: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        workload_from_source(source, {})
    assert str(caught.value) == message


def test_a_source_never_carries_the_permission_to_run_code() -> None:
    assert set(resolve("model", trust_remote_code=True).source) == {"kind", "path"}


def test_listing_models_is_light() -> None:
    code = "import sys, autofit.models as m; m.describe_presets()\n"
    code += "print({'torch', 'transformers', 'optuna'} & set(sys.modules))"
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
