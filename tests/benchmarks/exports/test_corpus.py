"""What came of published files is counted from the rows that are kept, and from nothing else."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.exports import corpus, corpus_drawn, corpus_parsers, corpus_summary
from benchmarks.exports.corpus import Assumed
from benchmarks.exports.corpus_summary import OWN, RESULTS, TOOLS, Rows, summary
from tests import warm

FILE = {
    "base_model": "tiny-llama",
    "datasets": [{"path": "some/data", "type": "alpaca"}],
    "sequence_len": 128,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-5,
    "gradient_checkpointing": True,
}


def row(name: str, outcome: str, devices: int = 4) -> dict[str, object]:
    return {
        "file": name,
        "outcome": outcome,
        "said": f"{name} cannot be tuned: why.",
        "gpu_mem": 80.0,
        "devices": devices,
        "time_limit": 9.0,
    }


def test_the_page_says_what_the_rows_say() -> None:
    tools = [Rows.read(tool) for tool in TOOLS]
    assert (RESULTS / "README.md").read_text() == summary(tools)
    for rows in tools:
        left_out = [rows.found.get(name, {}) for name in rows.left_out]
        assert "tuned" not in [row.get("outcome") for row in left_out]


def test_files_that_need_what_is_not_there_do_not_count() -> None:
    found = {
        "a": row("a", "tuned"),
        "b": row("b", "tuned", devices=8),
        "c": row("c", "refused"),
        "d": row("d", "no answer"),
        "e": row("e", "refused"),
    }
    parsed = [
        {"file": "a", "before": None, "after": None},
        {"file": "b", "before": "Error: old", "after": "Error: old"},
    ]
    page = summary([Rows("axolotl", found, {"e": "a server"}, parsed)])
    assert "**2 of 4** published files that can be tuned were: 50.0%" in page
    assert "| axolotl | 5 | 1 | 4 | 2 | 50% |" in page
    assert "- axolotl, a server: `e`\n" in page
    assert "`b`: 8 x 80 GiB" in page
    assert "`c`: why." in page
    assert "`d` (4 x 80 GiB, 9 s): why." in page
    assert "| axolotl | 2 | 1 | 1 | 0 |" in page
    assert "`b`, refused before: Error: old" in page


def test_only_files_without_an_answer_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(FILE))
    tried: list[tuple[str, str]] = []

    def outcome(path: Path, *_: object) -> tuple[str, str]:
        tried.append((path.name, Path.cwd().name))
        return ("tuned" if path.name == "a.yaml" else "no answer"), "said"

    monkeypatch.setattr(corpus, "outcome", outcome)
    results = tmp_path / "results.jsonl"
    given = [str(tmp_path), "--gpu-mem", "80", "--results", str(results)]
    for further in ([], [], ["--time-limit", "9"]):
        assert corpus.main([*given, *further]) == 0
    assert [name for name, _ in tried] == ["a.yaml", "b.yaml", "b.yaml"]
    assert {folder for _, folder in tried} == {corpus.BESIDE.name}
    assert capsys.readouterr().out.splitlines()[-1] == "1 tuned, 1 no answer"
    assert corpus.results_of(results)["b.yaml"]["time_limit"] == 9.0
    assert len(results.read_text().splitlines()) == 3


def test_a_published_file_is_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(yaml.safe_dump(FILE))
    assert corpus.outcome(path, None, Assumed()) == ("read", "axolotl, tiny-llama")

    path.write_text(yaml.safe_dump({**FILE, "fsdp_version": 2, "fsdp_config": {"version": 2}}))
    kind, said = corpus.outcome(path, None, Assumed())
    assert (kind, said.endswith("4 devices (given)")) == ("read", True)

    path.write_text("unknown: 1\n")
    kind, said = corpus.outcome(path, None, Assumed())
    assert (kind, said.startswith("axolotl.yaml is no file of")) == ("refused", True)


def test_parsers_get_the_options_of_a_command_as_yaml(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "NPROC_PER_NODE=2 swift pt --model m --fsdp '{\"version\": 2}' --target_modules a b\n"
    )
    written = corpus_parsers.as_yaml(script, tmp_path)
    assert written.read_text().startswith("# swift pt\n")
    found = yaml.safe_load(written.read_text())
    assert found == {"model": "m", "fsdp": {"version": 2}, "target_modules": ["a", "b"]}

    other = tmp_path / "train.yaml"
    assert corpus_parsers.as_yaml(other, tmp_path) == other


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (None, None, "taken"),
        ("wrong", None, "taken"),
        ("wrong", "wrong", "refused before"),
        (None, "wrong", "refused"),
    ],
)
def test_what_a_parser_refuses_untouched_is_not_held_against_tuning(
    before: str | None, after: str | None, verdict: str
) -> None:
    assert corpus_parsers.judged(before, after) == verdict


def test_a_parser_refusing_a_tuned_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.yaml").write_text("x: 1\n")

    def refusals(tool: str, python: Path, files: list[Path]) -> dict[Path, str | None]:
        return {path: "no" if "after" in path.parts else None for path in files}

    monkeypatch.setattr(corpus_parsers, "refusals", refusals)
    results = tmp_path / "parsers" / "axolotl.jsonl"
    results.parent.mkdir()
    earlier = {"file": "b.yaml", "before": None, "after": None}
    stale = {**earlier, "file": "a.yaml"}
    results.write_text(f"{json.dumps(stale)}\n{json.dumps(earlier)}\n")
    given = ["axolotl", "--python", "python", "--results", str(results)]
    for folder in ("before", "after"):
        given += [f"--{folder}", str(tmp_path / folder)]
    assert corpus_parsers.main(given) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 refused"
    assert list(map(json.loads, results.read_text().splitlines())) == [
        {"file": "a.yaml", "before": None, "after": "no"},
        earlier,
    ]
    assert set(corpus_summary.PUBLISHED) == {"axolotl", "llamafactory", "ms-swift"}


def test_files_are_changed_at_random_as_tuning_would_write_them(tmp_path: Path) -> None:
    """To what may be open alone, the same by the same seed."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.yaml").write_text(yaml.safe_dump(FILE, sort_keys=False))
    (files / "b.yaml").write_text("unknown: 1\n")

    made = []
    for place in ("first", "second"):
        output = tmp_path / place
        assert corpus_drawn.main([str(files), "--output", str(output), "--draws", "4"]) == 0
        names = sorted(path.name for path in (output / "after").iterdir())
        assert names == sorted(path.name for path in (output / "before").iterdir())
        made.append({name: (output / "after" / name).read_text() for name in names})

    first, second = made
    assert first == second
    assert len(first) > 1
    for text in first.values():
        written = yaml.safe_load(text)
        samples = written["micro_batch_size"] * written["gradient_accumulation_steps"]
        assert samples == FILE["gradient_accumulation_steps"]
        for key in ("base_model", "datasets", "sequence_len", "learning_rate"):
            assert written[key] == FILE[key]


@pytest.mark.parametrize("tool", OWN)
def test_the_tools_that_are_installed_take_what_may_be_written_of_their_files(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the files that are written here, each as for one config drawn at random."""
    pytest.importorskip(tool)
    files = Path(corpus.__file__).with_name("corpus_own") / tool
    drawn = ["--output", str(tmp_path), "--draws", "1", "--model", "tiny-llama", "--seq-len", "64"]
    assert corpus_drawn.main([str(files), *drawn]) == 0

    given = [tool]
    for folder in ("before", "after"):
        given += [f"--{folder}", str(tmp_path / folder)]
    with warm.python_for_scripts(tmp_path) as python:
        assert corpus_parsers.main([*given, "--python", python]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(list(files.iterdir()))} taken"
