"""`autofit search`: its answer, its exit codes, and one sentence for whatever is wrong with the input."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.record import Record
from autofit.core.result import SavedResult
from autofit.core.run_directory import RunDirectory
from tests.cli.command import CPU, LLAMA, PLAIN, Output, Run, assert_error
from tests.processes import signals_by_default

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_the_json_of_a_search(searched: Output) -> None:
    assert searched.code == 0
    answer = searched.json
    assert answer.keys() == {
        *(
            "schema",
            "best",
            "tiers",
            "trials",
            "skipped",
            "stopped_by",
            "nearest_miss",
            "space_size",
            "search_seconds",
        ),
        *(
            "predicted",
            "frontier",
            "alternatives",
            "other_budgets",
            "on_devices",
            "remedies",
            "notes",
        ),
        *("versions", "files"),
    }
    assert answer["schema"] == 1
    assert shape(answer["best"]["measured"]) == MEASURED
    assert list(answer["tiers"]) == ["full", "lora", "qlora"]
    assert answer["tiers"]["full"] == answer["best"]
    assert answer["tiers"]["lora"] is answer["tiers"]["qlora"] is None
    assert [trial.keys() for trial in answer["trials"]] == [TRIAL] * 3
    peak = {"allocated": int, "reserved": None, "device": None, "resident": int}
    assert shape(answer["trials"][0]["peak_bytes"]) == peak
    assert answer["skipped"].keys() == {"predicted", "dominated", "refused"}
    assert answer["stopped_by"] == "trials"
    assert answer["nearest_miss"] is None
    assert answer["versions"]["torch"]
    assert shape(answer["files"]) == {"result": str, "script": str, "exports": str, "report": str}


def test_the_files_and_the_progress_of_a_search(searched: Output) -> None:
    assert "probe 3 of 3: fits" in searched.err
    assert dict(SavedResult.load(Path("run/result.yaml")).config) == searched.json["best"]["config"]
    compile(Path("run/train.py").read_text(), "train.py", "exec")


MEASURED = {
    "tokens_per_second": float,
    "samples_per_second": float,
    "step_seconds": {"median": float, "low": float, "high": float},
    "peak_gib": {"allocated": float, "reserved": None, "device": None},
    "verified": True,
}
TRIAL = {
    *(
        "number",
        "config",
        "outcome",
        "tokens_per_second",
        "samples_per_second",
        "step_seconds",
        "peak_bytes",
        "reason",
    ),
    *("seconds", "build_seconds", "warmup_seconds", "compile_seconds"),
    *("loss", "steps", "composed", "verified", "communication_seconds", "warnings", "shortage"),
}


def shape(value: Any) -> Any:
    """The form of plain data: its keys, with types in the place of figures."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return type(value) if type(value) in (int, float, str) else value


@pytest.mark.usefixtures("shared_zygote", "searched")
def test_the_table_of_a_search_and_quiet(run: Run) -> None:
    printed = run(*PLAIN, "--trials", "3", "--resume", "--quiet")
    assert printed.code == 0
    assert printed.err == ""
    assert "tokens/s" in printed.out
    loud = run(*PLAIN, "--trials", "4", "--resume")
    assert "llama on" in loud.err
    assert "probe 4 of 4" in loud.err
    assert "probe 3 of 4" not in loud.err  # was measured before


@pytest.mark.usefixtures("shared_zygote", "searched")
def test_a_step_of_the_best_is_recorded_and_the_answer_is_markdown(here: Path, run: Run) -> None:
    printed = run(*PLAIN, "--trials", "3", "--resume", "--memory-snapshot", "--markdown")
    assert printed.code == 0
    assert printed.out.startswith("### llama on ")
    assert "| config | tokens/s | peak GiB | verdict |" in printed.out
    assert "memory snapshots need CUDA" in printed.err
    assert (here / "run" / "step_trace.json.gz").stat().st_size > 1000
    files = Record.load(here / "run" / "result.json").result.to_json()["files"]
    assert files["trace"] == str(here / "run" / "step_trace.json.gz")
    assert "memory_snapshot" not in files


@pytest.mark.usefixtures("shared_zygote", "here")
def test_a_function_of_ones_own(run: Run) -> None:
    answer = run(
        "search", "--model", "mine.py:good", *CPU, "--trials", "1", "--out", "run", "--json"
    ).json
    assert answer["best"]["measured"]["tokens_per_second"] is None
    assert answer["best"]["measured"]["samples_per_second"] > 0
    assert answer["files"]["script"] is None
    assert run("train", "run/result.yaml", "--data", "mine.py", "--from-scratch").code == 2


@pytest.mark.usefixtures("shared_zygote", "here")
def test_nothing_fits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run(*PLAIN, "--mem", "0.00001", "--trials", "2", "--json")
    assert printed.code == 3
    assert printed.json["best"] is None
    assert printed.json["nearest_miss"]["outcome"] == "out_of_memory"
    assert "Nothing fits: llama" in printed.err
    assert "What would help:" in printed.err
    # which takes seconds to find out
    monkeypatch.setattr("autofit.tuning.annotations.Annotator.remedies", lambda *_: ())
    plain = run(*PLAIN, "--mem", "0.00001", "--trials", "2", "--resume")
    assert (plain.code, plain.out) == (3, "")


FEW = (
    "--set",
    "precision=bf16,fp32",
    "--set",
    "micro_batch_size=1",
    "--space",
    "exact",
    "--seq-len",
    "64",
)
FEW += (
    "--set",
    "compile=none",
    "--set",
    "activation_offload=none",
    "--set",
    "attention=sdpa",
    "--set",
    "loss=standard",
    "--set",
    "optimizer=adamw",
    "--set",
    "activation_checkpointing=none",
)


@NO_CUDA
@pytest.mark.usefixtures("shared_zygote", "here")
def test_without_the_device_asked_for_probes_cannot_run(run: Run) -> None:
    printed = run("search", "--model", "tiny-llama", "--device", "cuda", *FEW, "--json")
    assert printed.code == 4
    assert "--device cpu" in printed.json["error"]["remedy"]
    assert "there is no CUDA device here" in printed.json["error"]["message"]


@NO_CUDA
@pytest.mark.usefixtures("shared_zygote", "here")
def test_without_the_card_the_best_config_is_predicted(run: Run) -> None:
    printed = run("search", "--model", "llama", "--gpu-mem", "24", *FEW, "--json")
    assert printed.code == 0, "the files that were asked for are written"
    assert "error" not in printed.json
    assert printed.json["notes"][0].startswith("There is no GPU on this machine")
    assert printed.json["best"] is None
    assert printed.json["predicted"]["estimate"]["fits"] == "yes"
    assert (
        SavedResult.load(Path(printed.json["files"]["result"])).config
        == printed.json["predicted"]["config"]
    )
    # before all else, and once
    assert printed.err.splitlines()[0] == printed.json["notes"][0]
    assert printed.err.count(printed.json["notes"][0]) == 1


@NO_CUDA
@pytest.mark.usefixtures("shared_zygote")
def test_a_prediction_is_shown_exported_and_reported_as_one(here: Path, run: Run) -> None:
    printed = run(
        "search", "--model", "llama", "--gpu", "rtx-4090", *FEW, "--out", "run", "--quiet"
    )
    assert printed.code == 0
    assert printed.err == ""
    assert printed.out.startswith("Predicted, not measured: about ")
    assert "autofit train run/result.yaml" in printed.out
    exported = run("export", "run/result.yaml", "--to", "trl")
    assert exported.code == 0
    assert exported.err.startswith("Nothing was measured of this config")
    assert "# Nothing of it was measured. Predicted on NVIDIA GeForce RTX 4090" in exported.out
    assert run("export", "run/result.yaml", "--to", "trl", "--json").json["predicted"] is True
    assert "**Predicted, not measured:**" in run("report", "run", "--format", "md").out
    assert run("report", "run").code == 0
    assert run("report", "run", "run").code == 0
    nothing = run("search", "--model", "llama", "--gpu-mem", "0.2", *FEW)
    assert nothing.code == 3
    assert "Nothing is predicted to fit" in nothing.err


class Interrupted:
    """An executor in which Ctrl-C is pressed at the third probe."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._probes = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def explorer(self) -> Any:
        return contextlib.nullcontext(self)

    def measure(self, *arguments: Any, **options: Any) -> Any:
        self._probes += 1
        if self._probes == 3:
            raise KeyboardInterrupt
        return self._executor.measure(*arguments, **options)


@pytest.mark.usefixtures("here")
def test_an_interrupt_shows_what_was_found(
    executor: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.tuning.measured.LocalExecutor", lambda *_: Interrupted(executor))
    with signals_by_default():
        printed = run(*PLAIN, "--json")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert printed.code == 130
    assert "interrupted; go on with --resume --out" in printed.err
    assert printed.json["stopped_by"] == "interrupt"
    assert len(printed.json["trials"]) == 2
    assert printed.json["best"]["measured"]["verified"] is False


@pytest.mark.usefixtures("shared_zygote", "here")
def test_a_search_starts_from_what_another_measured_until_that_is_cleared(run: Run) -> None:
    notice = r"earlier searches measured \d configs?: they tell where to start \(--no-store leaves them out\)"
    search = (
        "search",
        "--model",
        "mine.py:good",
        "--mem",
        "1",
        "--set",
        "micro_batch_size=2,4",
        "--json",
    )
    search += (
        "--set",
        "precision=fp32",
        "--set",
        "optimizer=adamw",
        "--set",
        "optimizer_in_backward=false",
    )
    assert "earlier searches" not in run(*search, "--no-store", "--out", "unknown").err
    first = run(*search, "--out", "first")
    assert "earlier searches" not in first.err  # the one before stored nothing
    again = run(*search, "--out", "again")
    assert re.search(notice, again.err)
    assert again.json["trials"] != first.json["trials"]
    assert {each["number"] for each in again.json["trials"]} <= {0, 1}
    assert "earlier searches" not in run(*search, "--no-store", "--out", "alone").err

    cleared = run("doctor", "--clear-store").out
    assert cleared.startswith("removed ")
    assert " measurements of 1 model from " in cleared
    assert run("doctor", "--clear-store", "--json").json["cleared"]["measurements"] == 0


# Bad input


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
    (("--seq-len", "0"), ["the sequence length must be from 1 to 2,147,483,648, not 0"]),
    (("--seq-len", "65"), ["takes sequences of at most 64 tokens, not 65"]),
    (
        ("--effective-batch", "0"),
        ["the effective batch size must be a positive whole number, not 0"],
    ),
    (("--set", "precision"), ["--set 'precision' is not knob=value"]),
    (("--set", "precision="), ["is not knob=value"]),
    (("--set", "seed=1", "--set", "seed=2"), ["--set seed is given twice"]),
    (("--set", "precision=[bf16"), ["--set precision=[bf16 cannot be read as YAML"]),
    (
        ("--set", "precision=!!python/object/apply:os.getcwd []"),
        ["cannot be read as YAML", "python/object/apply"],
    ),
    (("--trails", "3"), ["No such option: --trails"]),
    (("--unheard", "3"), ["No such option: --unheard. See --help."]),
    (("--resume",), ["to resume, the run directory must be named", "--out DIR"]),
    (("--resume", "--out", "none"), ["there is no search to resume in", "none"]),
    (("--out", "mine.py"), ["mine.py is a file, not a directory"]),
    (("--out", "llama"), ["llama already holds other files"]),
]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "words"), EARLY, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_bad_input_found_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: list[str]
) -> None:
    if "--out" in arguments:
        monkeypatch.setattr("autofit.tuning.measured.LocalExecutor", None)
    assert_error(run(*LLAMA, *arguments, "--json"), *words)


@pytest.mark.usefixtures("here")
def test_bad_input_without_json_leaves_stdout_empty(run: Run) -> None:
    assert_error(run(*LLAMA, "--trials", "0"), "must be at least 1", as_json=False)


LATE = [  # found by a look at the model in a process of its own
    (("--mem", "100000"), ["--mem 100000", "is more than the machine"]),
    (("--host-mem", "100000"), ["--host-mem 100000", "is more than the host"]),
    (
        ("--effective-batch", "6", "--set", "micro_batch_size=4"),
        ["micro_batch_size 4 does not divide the effective batch of 6", "1, 2, 3, 6"],
    ),
    (
        ("--model", "mine.py:broken_factory"),
        ["the model factory raised KeyError: 'hidden_size'", "mine.py:"],
    ),
    (("--model", "mine.py:no_model"), ["returned a dict, not an nn.Module"]),
    (("--model", "mine.py:frozen"), ["the model has no trainable parameter"]),
    (
        ("--model", "mine.py:vector"),
        ["the loss must be one number in a tensor, not a tensor of shape (2,)"],
    ),
    (("--model", "mine.py:number"), ["the loss must be one number in a tensor, not float"]),
    (("--model", "mine.py:constant"), ["the loss needs no gradient"]),
    (("--model", "mine.py:short_batch"), ["was asked for 4 samples and gave 1"]),
    (("--model", "mine.py:wrong_batch"), ["the loss raised RuntimeError: mat1 and mat2 shapes"]),
]


@pytest.mark.usefixtures("shared_zygote")
@pytest.mark.parametrize(
    ("arguments", "words"), LATE, ids=lambda value: " ".join(value) if type(value) is tuple else ""
)
def test_bad_input_found_by_a_look(
    here: Path, run: Run, arguments: tuple[str, ...], words: list[str]
) -> None:
    common = (
        ("search", *CPU, "--out", "run") if "--model" in arguments else (*LLAMA, "--out", "run")
    )
    assert_error(run(*common, *arguments, "--json"), *words)
    with RunDirectory(here / "run"):  # can be used again
        pass


@NO_CUDA
def test_an_unknown_card_is_reported_before_there_is_none(here: Path, run: Run) -> None:
    printed = run("search", "--model", "llama", "--gpu", "rtx-4900", "--json")
    assert_error(printed, "unknown GPU 'rtx-4900'", "Did you mean")
    assert "predicted" not in printed.err
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
        [sys.executable, "-c", HOLD, here / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        assert_error(run(*PLAIN, "--resume", "--json"), "is in use by another autofit process")
        other.stdin.close()


@pytest.mark.usefixtures("shared_zygote", "searched")
def test_a_run_directory_that_holds_a_search_already(run: Run) -> None:
    assert_error(run(*PLAIN, "--json"), "already holds a search", "Add --resume")
    printed = run(*PLAIN, "--mem", "2", "--resume", "--json", "--quiet")
    assert_error(printed, "holds a search of something else: budget_bytes was")


@pytest.mark.usefixtures("shared_zygote", "searched")
def test_a_run_directory_half_written(here: Path, run: Run) -> None:
    journal = here / "run" / "journal.log"
    whole = journal.read_text()
    journal.write_text(whole + whole.splitlines()[-1][:20])  # a power cut in the middle of a line
    printed = run(*PLAIN, "--trials", "3", "--resume", "--json")
    assert printed.code == 0
    assert len(printed.json["trials"]) == 3
    journal.write_text("{broken\n" + whole)
    printed = run(*PLAIN, "--trials", "3", "--resume", "--json")
    assert (
        "journal.log was damaged: 1 record of it cannot be read, 3 measurements can" in printed.err
    )
    assert [trial["number"] for trial in printed.json["trials"]] == [0, 1, 2]
    journal.write_text("")
    assert len(run(*PLAIN, "--trials", "1", "--resume", "--json").json["trials"]) == 1
