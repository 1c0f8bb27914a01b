"""A workload from the user's own file or module: it trains elsewhere, and each way to go wrong is one sentence."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from autofit.core.errors import InputError, NothingFitsError
from autofit.models.functions import function_workload, is_function, names_transformers

GOOD = """
import torch
from torch import nn
from autofit.core.workload import Workload
WIDTH = 4

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
    def forward(self, x, y):
        return (self.layer(x) - y).pow(2).mean()

def make():
    return Workload(model=lambda: Net(), batch=lambda n: {"x": torch.ones(n, WIDTH), "y": torch.ones(n, 1)})

def named():
    return Workload(model=Net, batch=lambda n: {"x": torch.ones(n, 8, WIDTH), "y": torch.ones(n, 8, 1)},
                    unit="tokens", sequence_length=8, effective_batch_size=6, name="mine")

not_a_function = Workload(model=Net, batch=lambda n: {})
"""
# Run where the file cannot be imported: what a probe does with a workload.
ELSEWHERE = """
import pickle, sys
for workload in pickle.load(open(sys.argv[1], "rb")):
    loss = workload.model()(**workload.batch(2))
    loss.backward()
    print(loss.dim())
"""


@pytest.fixture(autouse=True)
def import_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What these tests import and put on the path is gone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "flow.py", GOOD)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(reference: str, **options: int) -> str:
    with pytest.raises(InputError) as caught:
        function_workload(reference, **options)
    return str(caught.value)


def test_a_file_makes_a_workload(good: Path) -> None:
    workload = function_workload("flow.py:make")
    assert workload.name == "flow.make"
    assert workload.source == {"kind": "function", "function": f"{good}:make"}
    assert workload.model()(**workload.batch(2)).dim() == 0


def test_it_keeps_its_own_name_sizes_and_unit(good: Path) -> None:
    workload = function_workload(f"{good}:named")
    assert (workload.name, workload.unit) == ("mine", "tokens")
    assert (workload.sequence_length, workload.effective_batch_size) == (8, 6)


def test_the_effective_batch_can_be_replaced_and_its_own_length_repeated(good: Path) -> None:
    workload = function_workload(f"{good}:named", sequence_length=8, effective_batch_size=12)
    assert workload.effective_batch_size == 12


def test_it_reaches_a_process_that_cannot_import_the_file(good: Path, tmp_path: Path) -> None:
    payload = tmp_path / "workloads.pickle"
    payload.write_bytes(
        cloudpickle.dumps([function_workload(f"{good}:{name}") for name in ("make", "named")])
    )
    good.unlink()
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, payload],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr


def test_files_beside_it_can_be_imported_also_later(tmp_path: Path) -> None:
    write(tmp_path / "parts" / "early_part.py", "def early(n): return {'n': n}")
    write(tmp_path / "parts" / "late_part.py", "def late(): return 'late'")
    body = (
        "from early_part import early\nfrom autofit.core.workload import Workload\ndef model():\n"
    )
    body += "    import late_part\n    return late_part.late()\ndef make(): return Workload(model=model, batch=early)"
    write(tmp_path / "parts" / "flow.py", body)
    workload = function_workload("parts/flow.py:make")
    assert (workload.batch(3), workload.model()) == ({"n": 3}, "late")


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for width in (2, 3):
        write(tmp_path / str(width) / "flow.py", GOOD.replace("WIDTH = 4", f"WIDTH = {width}"))
    first, second = (function_workload(f"{width}/flow.py:make") for width in (2, 3))
    assert [workload.model().layer.in_features for workload in (first, second)] == [2, 3]


def test_a_module_of_the_current_directory_makes_a_workload(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py", "")
    write(tmp_path / "shop" / "flow.py", GOOD)
    workload = function_workload("shop.flow:make")
    assert workload.name == "shop.flow.make"
    assert workload.source == {"kind": "function", "function": "shop.flow:make"}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py:make", "the file {path}/gone.py is not there. Check the path before the colon."),
        ("flow.py:mak", "unknown flow.py function 'mak'. Did you mean 'make'?"),
        ("flow.py:", "flow.py: names no function. Write flow.py:NAME, with one of Net, make, named."),
        ("flow.py:not_a_function", "not_a_function in flow.py is not a function but a Workload. "
                                   "Write def not_a_function(): and return a Workload from it."),
        ("no_such_package.flow:make", "there is no module no_such_package. "
                                      "Give file.py:function, or run autofit where it can be imported."),
        ("json.gone:make", "there is no module json.gone. "
                           "Give file.py:function, or run autofit where it can be imported."),
    ],
)  # fmt: skip
def test_references_that_lead_nowhere(
    good: Path, tmp_path: Path, reference: str, message: str
) -> None:
    assert refusal(reference) == message.replace("{path}", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise ValueError('two\\n lines.')", "importing {file} failed at {file}:2: ValueError: two lines. "
                                                      "Correct the code."),
        ("x = 1\ny = (", "importing {file} failed at {file}:2: SyntaxError: '(' was never closed (bad.py, line 2). "
                         "Correct the code."),
        ("import json\njson.loads('{')", "importing {file} failed at {file}:2: JSONDecodeError: Expecting property "
                                         "name enclosed in double quotes: line 1 column 2 (char 1). Correct the code."),
        ("import no_such_thing", "importing {file} failed at {file}:1: ModuleNotFoundError: "
                                 "No module named 'no_such_thing'. Correct the code."),
        ("raise SystemExit", "importing {file} failed at {file}:1: SystemExit. Correct the code."),
        ("raise GeneratorExit('no')", "importing {file} failed at {file}:1: GeneratorExit: no. Correct the code."),
        ("def make():\n    return missing", "calling bad.py:make failed at {file}:2: NameError: "
                                             "name 'missing' is not defined. Correct the code."),
        ("def make(x): pass", "calling bad.py:make failed: TypeError: make() missing 1 required positional "
                              "argument: 'x'. Correct the code."),
        ("def make(): return {}", "bad.py:make returned a dict, not a Workload. "
                                  "Let the function return autofit.Workload(model=..., batch=...)."),
        ("def make(): pass", "bad.py:make returned None, not a Workload. "
                             "Let the function return autofit.Workload(model=..., batch=...)."),
        ("import json", "bad.py has no functions. Write one that returns autofit.Workload(model=..., batch=...)."),
    ],
)  # fmt: skip
def test_code_that_fails(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "bad.py", text)
    assert refusal("bad.py:make") == message.replace("{file}", str(file))


def test_a_module_that_fails_inside_is_not_taken_for_one_that_is_missing(tmp_path: Path) -> None:
    file = write(tmp_path / "half_there.py", "import no_such_thing")
    assert refusal("half_there:make").startswith(
        f"importing half_there failed at {file}:1: ModuleNotFoundError"
    )


def test_autofits_own_errors_pass_as_they_are(tmp_path: Path) -> None:
    text = "from autofit.core.errors import NothingFitsError\n"
    write(tmp_path / "own.py", text + "def make(): raise NothingFitsError('said by the user.')")
    with pytest.raises(NothingFitsError, match=r"^said by the user\.$"):
        function_workload("own.py:make")


def test_a_file_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "bad.py", "raise ValueError")
    before = set(sys.modules)
    refusal("bad.py:make")
    assert set(sys.modules) == before


def test_a_very_long_reason_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "bad.py", "raise ValueError('x' * 10000)")
    assert 100 < refusal("bad.py:make").count("x") < 600


def test_another_sequence_length_is_refused(good: Path) -> None:
    assert refusal("flow.py:named", sequence_length=16) == (
        "the sequence length of flow.py:named is its own (8) and cannot be set to 16. Change it in the function."
    )
    assert "is its own (none) and" in refusal("flow.py:make", sequence_length=16)


def test_an_impossible_effective_batch_is_refused(good: Path) -> None:
    assert "effective batch size" in refusal("flow.py:make", effective_batch_size=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flow.py:make", True),
        ("/some where/flow.py:make", True),
        ("flow.py:", True),
        ("package.module:make", True),
        ("module:make", True),
        ("llama:7b", False),
        ("flow.py", False),
        ("https://somewhere/model", False),
        ("some/where:make", False),
        ("gpt2", False),
        (":make", False),
    ],
)
def test_references_are_recognised(text: str, expected: bool) -> None:
    assert is_function(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, False),
        ("from transformers import AutoModel\n" + GOOD, True),
        (f"{GOOD}\n    import peft\n", True),
    ],
    ids=["plain", "transformers", "peft"],
)
def test_a_file_that_names_transformers_is_told_from_one_of_plain_pytorch(
    tmp_path: Path, text: str, expected: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert names_transformers(f"{tmp_path / 'train.py'}:make") is expected


def test_what_cannot_be_read_may_name_transformers(tmp_path: Path) -> None:
    assert names_transformers("package.module:make")
    assert names_transformers(f"{tmp_path / 'missing.py'}:make")


def test_a_fifo_is_no_file_of_a_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    os.mkfifo(path)
    assert names_transformers(f"{path}:make")  # and does not wait for a writer
    with pytest.raises(InputError, match=r"mine\.py is no regular file\. Check the path"):
        function_workload(f"{path}:make")
