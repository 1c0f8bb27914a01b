"""The command line: answers, exit codes, and one sentence for whatever is wrong with the input."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import autofit
from autofit.cli import main
from autofit.core.errors import InputError
from autofit.core.estimate import PARTS
from autofit.core.options import parse_settings
from autofit.core.record import Record
from autofit.core.result import SavedResult
from autofit.core.run_directory import RunDirectory
from tests import tiny

DATA = Path(__file__).parents[1] / "examples" / "data"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

MINE = """
import torch
from torch import nn
from autofit import Workload

def batch(n):
    return {"input": torch.ones(n, 4)}

def loss(model, batch):
    return model(**batch).square().mean()

def net():
    return nn.Linear(4, 2)

def good():
    return Workload(model=net, batch=batch, loss=loss, effective_batch_size=4)

def raises():
    raise ValueError("no such data set")

def broken_factory():
    def broken():
        raise KeyError("hidden_size")
    return Workload(model=broken, batch=batch, loss=loss)

def no_model():
    return Workload(model=dict, batch=batch, loss=loss)

def frozen():
    return Workload(model=lambda: net().requires_grad_(False), batch=batch, loss=loss)

def vector():
    return Workload(model=net, batch=batch, loss=lambda model, batch: model(**batch).mean(dim=0))

def constant():
    return Workload(model=net, batch=batch, loss=lambda model, batch: torch.zeros(()))

def number():
    return Workload(model=net, batch=batch, loss=lambda model, batch: 1.0)

def short_batch():
    return Workload(model=net, batch=lambda n: batch(1), loss=loss)

def wrong_batch():
    return Workload(model=net, batch=lambda n: {"input": torch.ones(n, 5)}, loss=loss)
"""


class Said(NamedTuple):
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        assert isinstance(end.value.code, int)
        return Said(end.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, with workloads in mine.py and a small model in llama/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "llama").mkdir()
    config = {**tiny.LLAMA, "vocab_size": 256, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return tmp_path


CPU = ("--device", "cpu", "--mem", "1")
LLAMA = ("search", "--model", "llama", *CPU, "--seq-len", "16", "--effective-batch", "4")
PLAIN = (*LLAMA, "--set", "precision=fp32", "--set", "optimizer=adamw", "--set", "lora_rank=0", "--out", "run")


# Answers


@pytest.mark.usefixtures("shared_zygote")
def test_a_search_and_the_training_of_its_result(here: Path, run: Run) -> None:
    found = run(*PLAIN, "--trials", "3", "--json")
    assert found.code == 0
    assert found.json["best"]["measured"]["verified"] is True
    assert "probe 3 of 3: fits" in found.err
    saved = SavedResult.load(here / "run" / "result.yaml")
    assert dict(saved.config) == found.json["best"]["config"]
    compile((here / "run" / "train.py").read_text(), "train.py", "exec")

    trained = run(
        *("train", "run/result.yaml", "--data", DATA / "alice.txt", "--from-scratch", "--steps", "40", "--lr", "0.01"),
        *("--output", "out"),
    )
    assert trained.code == 0
    first, last = map(float, trained.out.strip().removeprefix("40 steps, loss ").split(" -> "))
    assert last < 0.75 * first
    assert "step 40: loss" in trained.err
    again = run("train", "run/result.yaml", "--data", DATA / "alice.txt", "--weights", "out/model", "--steps", "1")
    assert float(again.out.rpartition(" ")[2]) < 0.8 * first
    evaluated = run(
        *("train", "run/result.yaml", "--data", DATA / "alice.txt", "--weights", "out/model", "--steps", "1"),
        *("--eval-data", DATA / "alice.txt", "--padding", "--schedule", "cosine", "--warmup-steps", "1", "--quiet"),
    )
    assert ", evaluation loss " in evaluated.out
    assert "step 1" not in evaluated.err
    finished = run(
        *("train", "run/result.yaml", "--data", DATA / "alice.txt", "--from-scratch", "--steps", "40"),
        *("--output", "out", "--resume"),
    )
    assert finished[:2] == (0, "nothing left to train: out holds the finished run\n")


MEASURED = {
    "tokens_per_second": float,
    "samples_per_second": float,
    "step_seconds": {"median": float, "low": float, "high": float},
    "peak_gib": {"allocated": float, "reserved": None, "device": None},
    "verified": True,
}
TRIAL = {
    *("number", "config", "outcome", "tokens_per_second", "samples_per_second", "step_seconds", "peak_bytes", "reason"),
    *("seconds", "build_seconds", "warmup_seconds", "compile_seconds"),
    *("loss", "steps", "composed", "verified", "warnings"),
}


def shape(value: Any) -> Any:
    """The form of plain data: its keys, with types in the place of figures."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return type(value) if type(value) in (int, float, str) else value


@pytest.mark.usefixtures("shared_zygote")
def test_the_report_of_a_search(here: Path, run: Run) -> None:
    """Drawn at its end, and again from what was kept; the step shown is as large as the one that was measured."""
    found = run(*PLAIN, "--trials", "2", "--json").json
    page = Path(found["files"]["report"])
    assert page == here / "run" / "report.html"
    record = Record.load(here / "run" / "result.json")
    line, measured = record.timelines["full"], record.result.tiers["full"]
    assert measured
    assert measured.peak_bytes
    assert line.peak_bytes == pytest.approx(measured.peak_bytes.allocated, rel=0.01)
    drawn = page.read_text()
    assert "Where the memory goes" in drawn
    page.unlink()
    assert run("report", "run").out == f"{page}\n"
    assert page.read_text() == drawn
    assert run("report", "run", "--format", "md").out.startswith("### llama on ")
    assert "Both chose the same config." in run("report", "run", "run").out
    pictures = run("report", "run", "--format", "svg", "--output", "drawn").out.splitlines()
    assert Path("drawn/memory-timeline-full.svg") in map(Path, pictures)
    said = run("report", "nowhere")
    assert said.code == 2
    assert said.err == "autofit: nowhere is not there. Give the directory of a search, such as autofit-runs/NAME.\n"


@pytest.mark.usefixtures("shared_zygote", "here")
def test_the_json_of_a_search(run: Run) -> None:
    answer = run(*PLAIN, "--trials", "2", "--json").json
    assert answer.keys() == {
        *("schema", "best", "tiers", "trials", "skipped", "stopped_by", "nearest_miss", "space_size", "search_seconds"),
        *("predicted", "frontier", "alternatives", "other_budgets", "notes", "versions", "files"),
    }
    assert answer["schema"] == 1
    assert shape(answer["best"]["measured"]) == MEASURED
    assert list(answer["tiers"]) == ["full", "lora", "qlora"]
    assert answer["tiers"]["full"] == answer["best"]
    assert answer["tiers"]["lora"] is answer["tiers"]["qlora"] is None
    assert [trial.keys() for trial in answer["trials"]] == [TRIAL] * 2
    peak = {"allocated": int, "reserved": None, "device": None, "resident": int}
    assert shape(answer["trials"][0]["peak_bytes"]) == peak
    assert answer["skipped"].keys() == {"predicted", "dominated", "refused"}
    assert answer["stopped_by"] == "trials"
    assert answer["nearest_miss"] is None
    assert answer["versions"]["torch"]
    assert shape(answer["files"]) == {"result": str, "script": str, "exports": str, "report": str}


@pytest.mark.usefixtures("shared_zygote", "here")
def test_the_table_of_a_search_and_quiet(run: Run) -> None:
    said = run(*PLAIN, "--trials", "2", "--quiet")
    assert said.code == 0
    assert said.err == ""
    assert "tokens/s" in said.out
    loud = run(*PLAIN, "--trials", "3", "--resume")
    assert "llama on" in loud.err
    assert "probe 3 of 3" in loud.err
    assert "probe 2 of 3" not in loud.err  # was measured before


@pytest.mark.usefixtures("shared_zygote")
def test_a_step_of_the_best_and_of_a_training_is_recorded_and_the_answer_is_markdown(here: Path, run: Run) -> None:
    said = run(*PLAIN, "--trials", "1", "--memory-snapshot", "--markdown")
    assert said.code == 0
    assert said.out.startswith("### llama on ")
    assert "| config | tokens/s | peak GiB | verdict |" in said.out
    assert "memory snapshots need CUDA" in said.err
    assert (here / "run" / "step_trace.json.gz").stat().st_size > 1000
    again = run(*PLAIN, "--trials", "1", "--resume", "--memory-snapshot", "--json").json
    assert again["files"]["trace"] == str(here / "run" / "step_trace.json.gz")
    assert "memory_snapshot" not in again["files"]

    train = ("train", "run/result.yaml", "--data", str(DATA / "alice.txt"), "--from-scratch", "--memory-snapshot")
    told = run(*train, "--steps", "3", "--output", "out").err
    assert "one step was recorded: out/step_trace.json.gz (for ui.perfetto.dev)." in told
    assert (here / "out" / "step_trace.json.gz").exists()
    short = run(*train, "--steps", "2", "--output", "short").err
    assert "no step was recorded: fewer than three were trained." in short


@pytest.mark.usefixtures("shared_zygote", "here")
def test_a_function_of_ones_own(run: Run) -> None:
    answer = run("search", "--model", "mine.py:good", *CPU, "--trials", "1", "--out", "run", "--json").json
    assert answer["best"]["measured"]["tokens_per_second"] is None
    assert answer["best"]["measured"]["samples_per_second"] > 0
    assert answer["files"]["script"] is None
    assert run("train", "run/result.yaml", "--data", "mine.py", "--from-scratch").code == 2


@pytest.mark.usefixtures("shared_zygote", "here")
def test_nothing_fits(run: Run) -> None:
    said = run(*PLAIN, "--mem", "0.00001", "--trials", "2", "--json")
    assert said.code == 3
    assert said.json["best"] is None
    assert said.json["nearest_miss"]["outcome"] == "out_of_memory"
    assert "Nothing fits: llama" in said.err
    assert "What would help:" in said.err
    plain = run(*PLAIN, "--mem", "0.00001", "--trials", "2", "--resume")
    assert (plain.code, plain.out) == (3, "")


ESTIMATE = ("estimate", "--model", "llama", "--seq-len", "16", "--effective-batch", "4")


@pytest.mark.usefixtures("here")
def test_the_json_of_an_estimate(run: Run) -> None:
    said = run(*ESTIMATE, "--gpu", "rtx-4090", "--set", "micro_batch_size=2", "--set", "precision=bf16", "--json")
    assert said.code == 0
    answer = said.json
    assert answer["schema"] == 1
    assert answer["config"]["micro_batch_size"] == 2
    assert {key: shape(answer[key]) for key in answer if key not in ("config", "workload", "hardware", "notes")} == {
        "schema": int,
        "model": str,
        "budget_bytes": int,
        "usable_bytes": int,
        "allocated_bytes": int,
        "reserved_bytes": int,
        "device_bytes": {"low": int, "high": int},
        "breakdown": dict.fromkeys(PARTS, int),
        "step_seconds": float,
        "samples_per_second": float,
        "tokens_per_second": float,
        "utilisation": float,
        "fits": str,
        "bottleneck": str,
        "alternatives": None,
        "largest": None,
    }
    assert sum(answer["breakdown"].values()) == answer["allocated_bytes"] + answer["breakdown"]["context"]
    assert answer["fits"] == "yes"
    assert answer["bottleneck"] in ("compute", "memory", "transfer")


@pytest.mark.usefixtures("here")
def test_an_estimate_and_what_lies_around_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(_: object, __: object, configs: Sequence[object]) -> tuple[list[float], list[float]]:
        return [1.0 + 0.1 * place for place in range(len(configs))], [1.0] * len(configs)

    monkeypatch.setattr("autofit.api.what_if.predict_all", growing)  # which takes seconds, and is tested in its place
    asked = (*ESTIMATE, "--gpu", "h100", "--set", "optimizer=sgd", "--set", "precision=fp32")
    answer = run(*asked, "--json", "--alternatives").json
    knobs = {each["knob"] for each in answer["alternatives"]}
    assert {"precision", "optimizer", "micro_batch_size", "activation_checkpointing", "lora_rank"} <= knobs
    assert answer["largest"]["micro_batch_size"] == 4
    said = run(*asked)
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "llama: 16 tokens, effective batch 4, on NVIDIA H100 80GB within 79.10 GiB"
    assert lines[1].startswith("Fits: 0.")
    assert "from here" in said.out
    assert lines[-1].startswith("Largest that fits, all else as it is: micro-batch 4")
    short = run(*asked, "--no-alternatives")
    assert "from here" not in short.out
    assert short.out.splitlines()[1] == lines[1]


@pytest.mark.usefixtures("here")
def test_the_config_of_a_result_is_estimated_for_every_card(here: Path, run: Run) -> None:
    config = {"precision": "bf16", "micro_batch_size": 1}
    (here / "mine.yaml").write_text(json.dumps(config))
    answer = run(*ESTIMATE, "--config", "mine.yaml", "--gpu", "list", "--json").json
    assert answer["schema"] == 1
    assert {card["name"]: card["fits"] for card in answer["cards"]}.items() >= {"t4": "no", "h100": "yes"}.items()
    said = run(*ESTIMATE, "--config", "mine.yaml", "--gpu", "list")
    assert said.code == 0
    assert any(line.split()[:1] == ["h100"] and "yes" in line for line in said.out.splitlines())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h101"), "unknown GPU 'h101'"),
        (("--gpu", "list", "--mem", "2"), "--gpu list is about whole cards"),
        (("--gpu", "t4", "--set", "precision=bf16"), "bf16 needs compute capability 8.0"),
        (("--gpu", "h100", "--set", "precision=bf16,fp32"), "precision is set to 2 values"),
        (("--gpu", "h100", "--config", "mine.py"), "mine.py"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
def test_an_estimate_of_nothing(run: Run, arguments: tuple[str, ...], message: str) -> None:
    said = run(*ESTIMATE, *arguments, "--json")
    assert said.code == 2
    assert message in said.json["error"]["message"]


@NO_CUDA
@pytest.mark.usefixtures("shared_zygote", "here")
@pytest.mark.parametrize("card", [("--gpu-mem", "24"), ("--gpu", "rtx-4090"), ("--device", "cuda")], ids=str)
def test_without_the_device_probes_cannot_run(run: Run, card: tuple[str, str]) -> None:
    few = ("--set", "precision=bf16,fp32", "--set", "micro_batch_size=1,2")
    said = run("search", "--model", "tiny-llama", *card, "--space", "exact", "--seq-len", "64", *few, "--json")
    assert said.code == 4
    assert "--device cpu" in said.json["error"]["remedy"]
    if card[0] == "--device":
        assert "there is no CUDA device here" in said.json["error"]["message"]
        return
    assert said.json["error"]["message"].startswith("There is no GPU on this machine")
    assert said.json["best"] is None
    assert said.json["predicted"]["estimate"]["fits"] == "yes"
    assert SavedResult.load(Path(said.json["files"]["result"])).config == said.json["predicted"]["config"]
    assert said.err.splitlines()[0] == said.json["error"]["message"]  # before all else, and once
    assert said.err.count(said.json["error"]["message"]) == 1


@NO_CUDA
@pytest.mark.usefixtures("shared_zygote")
def test_a_prediction_is_shown_exported_and_reported_as_one(here: Path, run: Run) -> None:
    few = ("--set", "precision=bf16,fp32", "--set", "micro_batch_size=1", "--space", "exact", "--seq-len", "64")
    said = run("search", "--model", "tiny-llama", "--gpu", "rtx-4090", *few, "--out", "run", "--quiet")
    assert said.code == 4
    assert said.err == ""
    assert said.out.startswith("Predicted, not measured: about ")
    assert "autofit train run/result.yaml" in said.out
    exported = run("export", "run/result.yaml", "--to", "trl")
    assert exported.code == 0
    assert exported.err.startswith("Nothing was measured of this config")
    assert "# Nothing of it was measured. Predicted on NVIDIA GeForce RTX 4090" in exported.out
    assert run("export", "run/result.yaml", "--to", "trl", "--json").json["predicted"] is True
    assert "**Predicted, not measured:**" in run("report", "run", "--format", "md").out
    assert run("report", "run").code == 0
    assert run("report", "run", "run").code == 0
    (here / "run" / "result.json").unlink()
    nothing = run("search", "--model", "tiny-llama", "--gpu-mem", "0.2", *few)
    assert nothing.code == 3
    assert "Nothing is predicted to fit" in nothing.err


class Interrupted:
    """A executor in which Ctrl-C is pressed at the third probe."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._probes = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def measure(self, *arguments: Any, **options: Any) -> Any:
        self._probes += 1
        if self._probes == 3:
            raise KeyboardInterrupt
        return self._executor.measure(*arguments, **options)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
@pytest.mark.usefixtures("here")
def test_an_interrupt_tells_what_there_is(
    executor: Any, run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr("autofit.tuning.run.LocalExecutor", lambda *_: Interrupted(executor))
    said = run(*PLAIN, *(["--json"] if as_json else []))
    assert said.code == 130
    assert "interrupted; go on with --resume --out" in said.err
    if as_json:
        assert said.json["stopped_by"] == "interrupt"
        assert len(said.json["trials"]) == 2
        assert said.json["best"]["measured"]["verified"] is False
    else:
        assert "tokens/s" in said.out


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ((), "interrupted; with --output it could be resumed\n"),
        (("--output", "o"), "interrupted; go on with --resume --output o\n"),
    ],
)
def test_an_interrupted_training_tells_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, output: tuple[str, ...], told: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autofit.api.train.train", interrupted)
    said = run("train", "result.yaml", "--data", "a.txt", "--from-scratch", *output)
    assert (said.code, said.err) == (130, told)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
def test_an_interrupt_before_anything_is_known(run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autofit.cli.models.describe_presets", press)
    said = run("models", *(["--json"] if as_json else []))
    assert said.code == 130
    assert said.err == "autofit: interrupted.\n"
    assert bool(said.out) == as_json


def test_an_error_of_autofits_own_is_json_and_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.cli.models.describe_presets", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["models", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert "ZeroDivisionError: division by zero" in answer["error"]["message"]


def test_models(run: Run) -> None:
    rows = run("models", "--json").json["models"]
    assert {row["name"] for row in rows} >= {"llama-3.1-8b", "gpt2", "bert-base", "vit-base", "tiny-llama"}
    assert {"name", "task", "parameters", "hub"} <= rows[0].keys()
    plain = run("models")
    assert (plain.code, plain.err) == (0, "")
    assert all(row["name"] in plain.out for row in rows)


def test_spaces(run: Run) -> None:
    rows = run("spaces", "--json").json["spaces"]
    assert [row["name"] for row in rows] == ["everything", "exact", "full", "lora", "qlora"]
    assert all(row["configs"] > 0 for row in rows)
    assert all(row["description"] and Path(row["path"]).is_file() for row in rows)


@pytest.mark.usefixtures("shared_zygote", "here")
def test_doctor(run: Run) -> None:
    found = run("doctor", "--device", "cpu", "--json")
    assert found.code == 0
    assert found.json["hardware"]["device"] == "cpu"
    plain = run("doctor", "--device", "cpu")
    assert "optimizer" in plain.out
    assert plain.err == ""
    assert run("doctor", "--device", "tpu", "--json").code == 2


@pytest.mark.usefixtures("shared_zygote", "here")
def test_a_search_starts_from_what_another_measured_until_that_is_cleared(run: Run) -> None:
    known = r"earlier searches measured \d configs?: they tell where to start \(--no-store leaves them out\)"
    search = ("search", "--model", "mine.py:good", "--mem", "1", "--set", "micro_batch_size=2,4", "--json")
    search += ("--set", "precision=fp32", "--set", "optimizer=adamw", "--set", "optimizer_in_backward=false")
    assert "earlier searches" not in run(*search, "--no-store", "--out", "unknown").err
    first = run(*search, "--out", "first")
    assert "earlier searches" not in first.err
    again = run(*search, "--out", "again")
    assert re.search(known, again.err)
    assert again.json["trials"] != first.json["trials"]
    assert {each["number"] for each in again.json["trials"]} <= {0, 1}
    assert "earlier searches" not in run(*search, "--no-store", "--out", "alone").err

    told = run("doctor", "--clear-store").out
    assert told.startswith("removed ")
    assert " measurements of 1 model from " in told
    assert run("doctor", "--clear-store", "--json").json["cleared"]["measurements"] == 0
    assert "earlier searches" not in run(*search, "--out", "after").err


def test_no_arguments_are_told_how_to_start(run: Run) -> None:
    said = run()
    assert (said.code, said.out) == (2, "")
    commands = [line.split()[1:] for line in said.err.splitlines() if line.startswith("  autofit ")]
    assert [words[0] for words in commands] == ["search", "search", "estimate"]
    assert "autofit --help" in said.err


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"autofit {autofit.__version__}\n", "")
    assert run("--version", "search").out == run("--version").out


# Bad input


def assert_told(said: Said, *words: str, as_json: bool) -> None:
    """One sentence on stderr and no traceback; with --json one object on stdout that says the same."""
    assert said.code == 2, said
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("autofit: ")
    assert all(word in said.err for word in words), said.err
    if as_json:
        answer = said.json
        assert answer.keys() == {"schema", "error"}
        assert answer["error"].keys() == {"message", "remedy"}
        assert f"autofit: {answer['error']['message']} {answer['error']['remedy']}".strip() == said.err.strip()
    else:
        assert said.out == ""


EARLY = [  # found before anything is started
    (("--model", "gpt3"), ["unknown model 'gpt3'", "Did you mean 'gpt2'?"]),
    (("--model", "./nowhere"), ["the directory ./nowhere is not there"]),
    (("--model", "nowhere.py:make"), ["nowhere.py is not there"]),
    (("--model", "mine.py:goood"), ["unknown mine.py function 'goood'", "Did you mean 'good'?"]),
    (("--model", "mine.py:raises"), ["no such data set", "mine.py:"]),
    (("--model", "mine.py"), ["mine.py is a file, not a model", "mine.py:FUNCTION"]),
    (("--mem", "0"), ["the memory must be more than 0 GiB, not 0"]),
    (("--mem", "-2"), ["must be more than 0 GiB"]),
    (("--mem", "lots"), ["must be a number of GiB, not 'lots'"]),
    (("--mem", "nan"), ["must be more than 0 GiB, not nan"]),
    (("--mem", ""), ["must be a number of GiB, not ''"]),
    (("--host-mem", "0"), ["the host memory must be more than 0 GiB"]),
    (("--gpu-mem", "8"), ["name two budgets"]),
    (("--gpu", "rtx-4090"), ["the device is the CPU"]),
    (("--device", "tpu"), ["the device must be cpu or cuda, not 'tpu'"]),
    (("--margin", "1"), ["the margin must be a fraction"]),
    (("--margin", "none"), ["'--margin'"]),
    (("--tolerance", "-1"), ["the tolerance must be a fraction"]),
    (("--trials", "0"), ["the number of trials must be at least 1, not 0"]),
    (("--trials", "many"), ["'--trials'"]),
    (("--time-limit", "soon"), ["a time cannot be 'soon'", "10m"]),
    (("--time-limit", "0s"), ["the time limit must be more than 0 s"]),
    (("--seq-len", "0"), ["the sequence length must be a whole number of at least 2, not 0"]),
    (("--seq-len", "65"), ["takes sequences of at most 64 tokens, not 65"]),
    (("--effective-batch", "0"), ["the effective batch size must be a positive whole number, not 0"]),
    (("--set", "precision"), ["--set 'precision' is not knob=value"]),
    (("--set", "precision="), ["is not knob=value"]),
    (("--set", "seed=1", "--set", "seed=2"), ["--set seed is given twice"]),
    (("--set", "precision=[bf16"), ["--set precision=[bf16 cannot be read as YAML"]),
    (("--set", "precision=!!python/object/apply:os.getcwd []"), ["cannot be read as YAML", "python/object/apply"]),
    (("--trails", "3"), ["No such option: --trails"]),
    (("--resume",), ["to resume, the run directory must be named", "--out DIR"]),
    (("--resume", "--out", "none"), ["there is no search to resume in", "none"]),
    (("--out", "mine.py"), ["mine.py is a file, not a directory"]),
    (("--out", "llama"), ["llama already holds other files"]),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
@pytest.mark.parametrize(
    ("arguments", "words"), EARLY, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_bad_input_found_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: list[str], as_json: bool
) -> None:
    if "--out" in arguments:
        monkeypatch.setattr("autofit.tuning.run.LocalExecutor", None)
    assert_told(run(*LLAMA, *arguments, *(["--json"] if as_json else [])), *words, as_json=as_json)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("serch",), ["No such command 'serch'"]), (("search",), ["Missing option", "--model"]), (("models", "x"), ["x"])],
)
def test_bad_commands(run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    assert_told(run(*arguments, "--json"), *words, as_json=True)


LATE = [  # found by a look at the model in a process of its own
    (("--mem", "100000"), ["--mem 100000", "is more than the machine"]),
    (("--host-mem", "100000"), ["--host-mem 100000", "is more than the host"]),
    (("--set", "precison=fp32"), ["unknown knob to search 'precison'", "Did you mean 'precision'?"]),
    (("--set", "precision=bf61"), ["unknown value for precision 'bf61'", "Did you mean 'bf16'?"]),
    (("--set", "lora_rank=0,0"), ["lora_rank lists 0 twice"]),
    (
        ("--effective-batch", "6", "--set", "micro_batch_size=4"),
        ["micro_batch_size 4 does not divide the effective batch of 6", "1, 2, 3, 6"],
    ),
    (("--space", "fulll"), ["unknown space 'fulll'", "Did you mean 'full'?"]),
    (("--space", "malformed.yaml"), ["malformed.yaml cannot be read as YAML", "line 4"]),
    (("--space", "doubled.yaml"), ["the key 'precision' is given twice", "line 4"]),
    (("--space", "harmful.yaml"), ["cannot be read as YAML", "python/object/apply"]),
    (("--space", "unknown.yaml"), ["unknown knob to search 'precison'", "Did you mean 'precision'?"]),
    (("--model", "mine.py:broken_factory"), ["the model factory raised KeyError: 'hidden_size'", "mine.py:"]),
    (("--model", "mine.py:no_model"), ["returned a dict, not an nn.Module"]),
    (("--model", "mine.py:frozen"), ["the model has no trainable parameter"]),
    (("--model", "mine.py:vector"), ["the loss must be one number in a tensor, not a tensor of shape (2,)"]),
    (("--model", "mine.py:number"), ["the loss must be one number in a tensor, not float"]),
    (("--model", "mine.py:constant"), ["the loss needs no gradient"]),
    (("--model", "mine.py:short_batch"), ["was asked for 4 samples and gave 1"]),
    (("--model", "mine.py:wrong_batch"), ["the loss raised RuntimeError: mat1 and mat2 shapes"]),
]
SPACES = {
    "malformed": "description: x\nknobs:\n  precision: [fp32\n  optimizer: [adamw]\n",
    "doubled": "description: x\nknobs:\n  precision: [fp32]\n  precision: [bf16]\n",
    "harmful": "description: x\nknobs: !!python/object/apply:os.mkdir [ran]\n",
    "unknown": "description: x\nknobs:\n  precison: [fp32]\n",
}


@pytest.mark.usefixtures("shared_zygote")
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "plain"])
@pytest.mark.parametrize(
    ("arguments", "words"), LATE, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_bad_input_found_by_a_look(
    here: Path, run: Run, arguments: tuple[str, ...], words: list[str], as_json: bool
) -> None:
    for name, text in SPACES.items():
        (here / f"{name}.yaml").write_text(text)
    common = ("search", *CPU, "--out", "run") if "--model" in arguments else (*LLAMA, "--out", "run")
    assert_told(run(*common, *arguments, *(["--json"] if as_json else [])), *words, as_json=as_json)
    assert not (here / "ran").exists()
    with RunDirectory(here / "run"):  # can be used again
        pass


@NO_CUDA
def test_an_unknown_card_is_told_of_before_there_is_none(here: Path, run: Run) -> None:
    said = run("search", "--model", "llama", "--gpu", "rtx-4900", "--json")
    assert_told(said, "unknown GPU 'rtx-4900'", "Did you mean", as_json=True)
    assert "predicted" not in said.err
    assert not (here / "autofit-runs").exists()


HOLD = """
import sys
from pathlib import Path
from autofit.core.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])) as held:
    held.journal.touch()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_directory_in_use(here: Path, run: Run) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, here / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        assert_told(run(*PLAIN, "--resume", "--json"), "is in use by another autofit process", as_json=True)
        other.stdin.close()


@pytest.mark.usefixtures("shared_zygote")
def test_a_run_directory_that_holds_a_search_already(here: Path, run: Run) -> None:
    run(*PLAIN, "--trials", "1", "--quiet")
    assert_told(run(*PLAIN, "--json"), "already holds a search", "Add --resume", as_json=True)
    said = run(*PLAIN, "--mem", "2", "--resume", "--json", "--quiet")
    assert_told(said, "holds a search of something else: budget_bytes was", as_json=True)


@pytest.mark.usefixtures("shared_zygote")
def test_a_run_directory_half_written(here: Path, run: Run) -> None:
    run(*PLAIN, "--trials", "2", "--quiet")
    journal = here / "run" / "journal.log"
    whole = journal.read_text()
    journal.write_text(whole + whole.splitlines()[-1][:20])  # a power cut in the middle of a line
    said = run(*PLAIN, "--trials", "2", "--resume", "--json")
    assert said.code == 0
    assert len(said.json["trials"]) == 2
    journal.write_text("{broken\n" + whole)
    said = run(*PLAIN, "--trials", "2", "--resume", "--json", "--quiet")
    assert_told(said, "journal.log is damaged: its line 1 cannot be read", as_json=True)
    journal.write_text("")
    assert len(run(*PLAIN, "--trials", "2", "--resume", "--json").json["trials"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.yaml", "--from-scratch"), ["the file none.yaml is not there"]),
        (("broken.yaml", "--from-scratch"), ["broken.yaml cannot be read as YAML"]),
        (("other.yaml", "--from-scratch"), ["other.yaml is not a result of autofit: it lacks"]),
        (("other.yaml",), ["say what to start from", "--from-scratch"]),
        (("other.yaml", "--from-scratch", "--weights", "llama"), ["say what to start from"]),
        (("other.yaml", "--weights", "none"), ["the directory none is not there"]),
        (("other.yaml", "--from-scratch", "--steps", "x"), ["'--steps'"]),
        (("other.yaml", "--from-scratch", "--memory-snapshot"), ["has nowhere to write to", "Give --output DIR"]),
    ],
)
def test_bad_input_to_train(here: Path, run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    (here / "broken.yaml").write_text("config: [")
    (here / "other.yaml").write_text("some: file")
    assert_told(run("train", *arguments, "--data", DATA / "alice.txt"), *words, as_json=False)


# --set


def test_settings_are_values_of_yaml() -> None:
    assert parse_settings(
        ["precision=bf16,fp32", "lora_rank = 8, 16", "compile=true", "rate=1.5", "lora_targets=null"]
    ) == {
        "precision": ("bf16", "fp32"),
        "lora_rank": (8, 16),
        "compile": (True,),
        "rate": (1.5,),
        "lora_targets": (None,),
    }
    assert parse_settings([]) == {}


@pytest.mark.parametrize("setting", ["precision", "=fp32", " =fp32", "precision=", "precision= "])
def test_settings_of_another_form(setting: str) -> None:
    with pytest.raises(InputError, match="is not knob=value"):
        parse_settings([setting])
