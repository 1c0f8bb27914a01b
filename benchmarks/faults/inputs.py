"""Bad inputs: command lines, files and arguments of calls that begin right and are then changed in a few places.

Every drawn path lies in the folder of the try, and none names a device. A search or a training that finds nothing wrong
ends where it would start processes: what follows is for faults.
"""

import importlib
import inspect
import json
import os
import resource
from pathlib import Path
from typing import Any

import typer
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.faults.scenarios import LLAMA, RESULT, WORKLOAD, hostile
from benchmarks.faults.tries import Ended, Tries

_MOST_BYTES = 2**34
_REACHED = 77  # the exit code of what found nothing wrong
_CPU = ["--device", "cpu", "--mem", "1"]
COMMANDS: dict[str, list[str]] = {
    "search": [
        "--model",
        "llama",
        *_CPU,
        "--seq-len",
        "16",
        "--effective-batch",
        "4",
        "--space",
        "drawn",
        "--json",
    ],
    "estimate": [
        "--model",
        "llama",
        *_CPU,
        "--seq-len",
        "16",
        "--config",
        "drawn",
        "--no-alternatives",
    ],
    "train": [
        "result.yaml",
        "--data",
        "drawn.jsonl",
        "--from-scratch",
        "--steps",
        "2",
        "--output",
        "out",
    ],
    "export": ["drawn", "--to", "trl", "--output", "exported"],
    "report": ["run", "--format", "md"],
    "doctor": ["--device", "cpu"],
    "models": [],
    "spaces": ["--json"],
}
_MODEL = {"llama/config.json": LLAMA}
FILES: dict[str, dict[str, Any]] = {  # read by the unchanged ones
    "command search": {
        "drawn": {
            "description": "two",
            "knobs": {"precision": ["fp32"], "micro_batch_size": [2, 4]},
        }
    },
    "command estimate": {**_MODEL, "drawn": RESULT["config"]},
    "command train": {**_MODEL, "result.yaml": RESULT, "drawn.jsonl": {"text": "a b c d e f g h"}},
    "command export": {"drawn": RESULT},
    "call estimate": _MODEL,
    "call export": {"result.yaml": RESULT},
    "call training_arguments": {"result.yaml": RESULT},
}
CALLS: dict[str, dict[str, Any]] = {
    "search": {"model": "llama", "seq_len": 16, "effective_batch": 4, "device": "cpu", "mem": 1},
    "fit": {"model": None, "loader": [], "device": "cpu", "mem": 1, "steps": 1},
    "estimate": {
        "model": "llama",
        "config": {"precision": "fp32"},
        "seq_len": 16,
        "effective_batch": 4,
    },
    "export": {"result": "result.yaml", "to": "trl"},
    "explain": {"result": "result.yaml"},
    "training_arguments": {"result": "result.yaml", "output_dir": "out"},
    "Workload": {"model": dict, "batch": dict, "effective_batch_size": 4},
    "Config": {},
}
NAMES = [f"command {name}" for name in COMMANDS] + [f"call {name}" for name in CALLS]
_WORDS = [
    "",
    "0",
    "-1",
    "1e400",
    "nan",
    "inf",
    "1,2",
    "=",
    "a=b",
    "precision=bf16,x",
    "lora_rank=8",
    "all",
    "list",
]
_WORDS += [
    "ray",
    "cuda",
    "cpu",
    "drawn",
    "run",
    "llama",
    "mine.py:make",
    "mine.py:",
    "no.module:f",
    "llama-3.1-8b",
]
_WORDS += [
    "rtx-4090",
    "html",
    "trl",
    "deepspeed",
    "1.5",
    "99999999999999999999",
    "10m",
    "\x1b[31m",
    "out",
    "no/such",
]
_WORDS += [
    "x" * 5000,
    "x y " * 2000,
    'we"ird.yaml',
    "it's.yaml",
    "a\nb",
    "n" * 250,
    "=cmd",
    "$(true)",
    "a;b",
]
_WORDS += [
    "x\u2028import os\u2028#",
    "x\x85y",
    "x\x0cy",
    "</script>",
    "</details>",
    '"""',
    "'''",
    "{{x}}",
    "\u202egpj.exe",
]
_text = st.text(max_size=20) | st.sampled_from(_WORDS)
_words = _text.filter(
    lambda word: not word.startswith(("/", "~", "-")) and ".." not in word and "\0" not in word
)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | _text
    | st.sampled_from([10**400, "fp32", "bf16"])
)
_keys = (
    st.sampled_from(
        [*RESULT, *RESULT["config"], *RESULT["workload"], "kind", "path", "space", "values"]
    )
    | _text
)
_data = st.recursive(
    _scalars,
    lambda of: st.lists(of, max_size=3) | st.dictionaries(_keys, of, max_size=4),
    max_leaves=8,
)


class _Mute:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


_objects = [
    Path("drawn"),
    Path("no/such"),
    b"x",
    object,
    len,
    _Mute(),
    {1: 2},
    (),
    {1},
    range(3),
    1j,
    KeyError("x"),
]
_values = _data | st.sampled_from(_objects)


@st.composite
def _files(draw: Any, name: str, canary: Path) -> dict[str, bytes]:
    """Files that it reads, some of them: right data with a change, data of any shape, hostile text, or bytes."""
    known = FILES.get(name, {"drawn": RESULT})
    return {
        path: draw(_content(known[path], canary))
        for path in draw(st.sets(st.sampled_from([*known]), max_size=2))
    }


@st.composite
def _content(draw: Any, right: Any, canary: Path) -> bytes:
    kind = draw(st.integers(0, 8))
    if kind == 8:
        return draw(
            st.sampled_from(
                [_merging(), _aliases(), b"a: 1:" + b"00:" * 3000 + b"00\n", b"[" * 5000]
            )
        )
    if kind == 0:
        return bytes(draw(st.binary(max_size=60)))
    if kind == 1:
        return hostile(canary, draw(st.randoms(use_true_random=False)))
    if kind == 2:
        return _dumped(draw(_data), draw(st.booleans()))
    changed = at = json.loads(json.dumps(right))
    key = draw(st.sampled_from([*_places(at)]) | _keys)
    while isinstance(at.get(key), dict) and draw(st.booleans()):
        at, key = at[key], draw(st.sampled_from([*_places(at[key])]) | _keys)
    if kind == 3:
        at.pop(key, None)
    else:
        at[key] = draw(_data)
    return _dumped(changed, draw(st.booleans()))


def _merging() -> bytes:
    """Merge keys of merge keys: each line doubles what the one before it holds."""
    lines = [
        "a0: &a0 {x: 1}",
        *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: 1}}" for n in range(1, 26)),
    ]
    return "\n".join(lines).encode()


def _aliases() -> bytes:
    """Lists of lists, ten of the one before in each."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)),
    ]
    return "\n".join(lines).encode()


def _places(data: dict[str, Any]) -> list[str]:
    return [*data] or ["x"]


def _dumped(data: Any, as_json: bool) -> bytes:
    text = json.dumps(data) if as_json else yaml.dump(data, allow_unicode=True)
    return text.encode(errors="surrogatepass")


@st.composite
def _commands(draw: Any, name: str) -> list[str]:
    """A command line that is changed in at most two places."""
    command = typer.main.get_command(importlib.import_module("autofit.cli").app).commands[name]  # type: ignore[attr-defined]
    options = [
        (each.opts[-1], each.is_flag) for each in command.params if each.opts[0].startswith("-")
    ]
    words = list(COMMANDS[name])
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        how = draw(st.integers(0, 3))
        at = draw(st.integers(0, max(0, len(words) - 1)))
        if how == 0 and words and not words[at].startswith("-"):
            words[at] = draw(_words)
        elif how == 1 and words:
            del words[at]
        elif how == 2:
            words.insert(at, draw(_words | st.sampled_from(["--no-such", "-x", "--"])))
        else:
            option, is_flag = draw(st.sampled_from(options)) if options else ("--json", True)
            words += [option] if is_flag else [option, draw(_words)]
    return [name, *words]


@st.composite
def _arguments(draw: Any, name: str) -> dict[str, Any]:
    """Arguments of a call, at most two of them changed."""
    function = getattr(importlib.import_module("autofit"), name)
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [
        each.name for each in inspect.signature(function).parameters.values() if each.kind in plain
    ]
    changed = draw(st.dictionaries(st.sampled_from(names), _values, max_size=2))
    return CALLS[name] | changed


def broken_by(tries: Tries, key: str, name: str, count: int) -> tuple[int, dict[str, str]]:
    """How many inputs of one command or call were tried, and what they break, each with the smallest that does."""
    tried, found = 0, dict[str, str]()
    kind, _, target = name.partition(" ")
    drawn = _commands(target) if kind == "command" else _arguments(target)

    @seed(key)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(drawn, _files(name, tries.canary))
    def look(given: Any, files: dict[str, bytes]) -> None:
        nonlocal tried, latest
        tried += 1
        work = prepare(tries, name)
        for path, content in files.items():
            (work / path).write_bytes(content)
        broken = _command(tries, given) if kind == "command" else _call(tries, target, given)
        broken = [each for each in broken if each not in found]
        if broken:
            latest = broken[0], f"{given!r} with {files!r}"
            raise AssertionError(broken[0])

    latest = ("", "")
    while tried < count:
        try:
            look()
            break
        except AssertionError:
            found[latest[0]] = latest[1]
    return tried, found


def prepare(tries: Tries, name: str) -> Path:
    """A folder with all that the unchanged inputs name."""
    work = tries.fresh()
    (work / "mine.py").write_text(WORKLOAD)
    (work / "llama").mkdir()
    for path, right in (
        {"llama/config.json": LLAMA, "result.yaml": RESULT} | FILES.get(name, {})
    ).items():
        (work / path).write_text(json.dumps(right))
    return work


def _command(tries: Tries, words: list[str]) -> list[str]:
    ended = tries.command(words, before=_stop_early)
    return [] if ended.code == _REACHED else ended.broken


def _call(tries: Tries, name: str, arguments: dict[str, Any]) -> list[str]:
    """A call may raise one of autofit's errors, a TypeError or a ValueError, of one sentence; or return."""

    def call() -> None:
        _stop_early()
        autofit = importlib.import_module("autofit")
        try:
            getattr(autofit, name)(**arguments)
        except (autofit.AutofitError, TypeError, ValueError) as error:
            print(json.dumps([type(error).__name__, str(error)]))

    ended = tries.call(call)
    return [] if ended.code == _REACHED else ended.broken + _raised(ended)


def _raised(ended: Ended) -> list[str]:
    if ended.code != 0:
        return [f"it raises {(ended.err.strip().splitlines() or ['nothing'])[-1][:200]}"]
    kind, message = (
        json.loads(ended.out.splitlines()[-1]) if ended.out.startswith("[") else ("", "fine")
    )
    if not message.strip() or len(message) > 1500:
        return [f"{kind} of {len(message)} characters"]
    return []


def _stop_early() -> None:
    """In the process of a try."""

    def reached(*_: Any, **__: Any) -> Any:
        os._exit(_REACHED)

    # what a config asks for may be more than there is
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    for module in ("tuning.measured", "tuning.predicted", "api.doctor"):
        importlib.import_module(f"autofit.{module}").LocalExecutor = reached  # type: ignore[attr-defined]
    importlib.import_module("autofit.tuning.measured").RayExecutor = reached  # type: ignore[attr-defined]
    importlib.import_module("autofit.api.train").fit = reached  # type: ignore[attr-defined]
