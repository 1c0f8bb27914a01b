"""`autofit estimate`: its JSON, its tables, and what is wrong with its input."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from autofit.api import what_if
from autofit.core.estimate import OF_SEVERAL, PARTS, Resting
from tests.cli.command import Run
from tests.cli.test_search import shape

ESTIMATE = ("estimate", "--model", "llama", "--seq-len", "16", "--effective-batch", "4")


@pytest.mark.usefixtures("here")
def test_options_of_the_loss_change_what_is_predicted(run: Run) -> None:
    distil = (*ESTIMATE, "--task", "distill", "--teacher", "llama", "--gpu", "h100", "--json")
    whole = run(*distil).json["allocated_bytes"]
    assert run(*distil, "--loss-option", "top_k=2").json["allocated_bytes"] < whole

    wrong = run(*distil, "--loss-option", "top_k")
    assert wrong.code == 2
    assert "--loss-option 'top_k' is not name=value." in wrong.err


@pytest.mark.usefixtures("here")
def test_the_json_of_an_estimate(run: Run) -> None:
    printed = run(
        *ESTIMATE,
        "--gpu",
        "rtx-4090",
        "--set",
        "micro_batch_size=2",
        "--set",
        "precision=bf16",
        "--json",
    )
    assert printed.code == 0
    answer = printed.json
    assert answer["schema"] == 1
    assert answer["config"]["micro_batch_size"] == 2
    assert {
        key: shape(answer[key])
        for key in answer
        if key not in ("config", "workload", "hardware", "notes")
    } == {
        "schema": int,
        "model": str,
        "budget_bytes": int,
        "usable_bytes": int,
        "allocated_bytes": int,
        "reserved_bytes": int,
        "device_bytes": {"low": int, "high": int},
        "breakdown": {part: int for part in PARTS if part not in OF_SEVERAL},
        "step_seconds": float,
        "samples_per_second": float,
        "tokens_per_second": float,
        "utilisation": float,
        "fits": str,
        "bottleneck": str,
        "host_bytes": int,
        "evaluation_bytes": int,
        "saving_bytes": int,
        "resting": dict.fromkeys((field.name for field in fields(Resting)), int),
        "alternatives": None,
        "largest": None,
        "remedies": None,
    }
    assert (
        sum(answer["breakdown"].values())
        == answer["allocated_bytes"] + answer["breakdown"]["context"]
    )
    assert answer["fits"] == "yes"
    assert answer["bottleneck"] in ("compute", "memory", "transfer")


@pytest.mark.usefixtures("here")
def test_an_estimate_for_several_devices(run: Run) -> None:
    cards = ("--gpu", "h100", "--devices", "4", "--nodes", "2", "--link", "ib-ndr")
    answer = run(*ESTIMATE[:-1], "16", *cards, "--set", "data_parallel_replicate=2", "--json").json
    degrees = ("data_parallel", "data_parallel_replicate", "data_parallel_shard")
    assert [answer["config"][name] for name in degrees] == ["fsdp", 2, 4]
    assert set(answer["breakdown"]) == set(PARTS)
    assert (
        sum(answer["breakdown"].values())
        == answer["allocated_bytes"] + answer["breakdown"]["context"]
    )
    assert answer["tokens_per_second"] > 0


@pytest.mark.usefixtures("here")
def test_an_estimate_and_what_lies_around_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(
        _: object, __: object, configs: Sequence[object], **options: object
    ) -> tuple[list[float], list[float]]:
        return [1.0 + 0.1 * place for place in range(len(configs))], [1.0] * len(configs)

    # which takes seconds, and is tested in its place
    monkeypatch.setattr("autofit.api.what_if.predict_all", growing)
    asked = (*ESTIMATE, "--gpu", "h100", "--set", "optimizer=sgd", "--set", "precision=fp32")
    answer = run(*asked, "--json", "--alternatives").json
    knobs = {each["knob"] for each in answer["alternatives"]}
    assert {
        "precision",
        "optimizer",
        "micro_batch_size",
        "activation_checkpointing",
        "lora_rank",
    } <= knobs
    assert answer["largest"]["micro_batch_size"] == 4
    printed = run(*asked)
    assert printed.code == 0
    lines = printed.out.splitlines()
    assert lines[0] == "llama: 16 tokens, effective batch 4, on NVIDIA H100 80GB within 79.10 GiB"
    assert lines[1].startswith("Fits: 0.")
    assert "from here" in printed.out
    assert lines[-1].startswith("Largest that fits, all else as it is: micro-batch 4")
    short = run(*asked, "--no-alternatives")
    assert "from here" not in short.out
    assert short.out.splitlines()[1] == lines[1]


@pytest.mark.usefixtures("here")
def test_alternatives_that_take_minutes_are_shown_when_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The llama here has too few blocks for a few of them to stand for all, as a UNet has."""
    monkeypatch.setattr(what_if, "_MANY_OPERATORS", 100)
    asked = (*ESTIMATE, "--gpu", "h100")
    printed = run(*asked)
    assert printed.code == 0
    assert "takes minutes for this model; ask for it with --alternatives" in printed.out.replace(
        "\n", " "
    )
    assert "from here" not in printed.out
    assert "from here" in run(*asked, "--alternatives").out


@pytest.mark.usefixtures("here")
def test_the_config_of_a_result_is_estimated_for_every_card(here: Path, run: Run) -> None:
    config = {"precision": "bf16", "micro_batch_size": 1}
    (here / "mine.yaml").write_text(json.dumps(config))
    answer = run(*ESTIMATE, "--config", "mine.yaml", "--gpu", "list", "--json").json
    assert answer["schema"] == 1
    assert {card["name"]: card["fits"] for card in answer["cards"]}.items() >= {
        "t4": "no",
        "h100": "yes",
    }.items()
    printed = run(*ESTIMATE, "--config", "mine.yaml", "--gpu", "list")
    assert printed.code == 0
    assert any(line.split()[:1] == ["h100"] and "yes" in line for line in printed.out.splitlines())


@pytest.mark.usefixtures("here")
def test_what_several_of_a_card_cost(here: Path, run: Run) -> None:
    (here / "prices.yaml").write_text("h100: 2.99\nl40s: 0.86\n")
    asked = (*ESTIMATE, "--gpu", "h100", "--devices", "1, 2", "--price", "prices.yaml")
    answer = run(*asked, "--json").json
    assert {(card["name"], card["devices"], card["nodes"]) for card in answer["cards"]} == {
        ("h100", 1, 1),
        ("h100", 2, 1),
    }
    assert all(card["dollars_per_billion_tokens"] > 0 for card in answer["cards"])
    printed = run(*asked)
    assert printed.code == 0
    assert "$/1e9 tokens" in printed.out
    assert "From 2 devices on: fsdp" in printed.out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ("h101: 1", "unknown GPU 'h101'"),
        (
            '{"h100": "cheap"}',
            "the price of h100 must be dollars an hour, from 0 to 1,000,000, not 'cheap'",
        ),
        ("h100: -1", "the price of h100 must be"),
        ("h100: 1\nh100: 2", "given twice"),
        ("- h100", "mapping"),
    ],
    ids=str,
)
def test_prices_that_are_none(here: Path, run: Run, prices: str, message: str) -> None:
    (here / "prices.yaml").write_text(prices)
    printed = run(*ESTIMATE, "--gpu", "list", "--price", "prices.yaml", "--json")
    assert printed.code == 2
    assert message in printed.json["error"]["message"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h101"), "unknown GPU 'h101'"),
        (("--gpu", "list", "--mem", "2"), "--gpu list is about whole cards"),
        (("--devices", "1,2"), "several numbers of devices are of cards"),
        (("--gpu", "h100", "--devices", "1,two"), "devices must be a whole number"),
        (("--gpu", "h100", "--price", "missing.yaml"), "the file missing.yaml is not there"),
        (("--gpu", "t4", "--set", "precision=bf16"), "bf16 needs compute capability 8.0"),
        (("--gpu", "h100", "--set", "precision=bf16,fp32"), "precision is set to 2 values"),
        (("--gpu", "h100", "--config", "mine.py"), "mine.py"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
def test_an_estimate_of_nothing(run: Run, arguments: tuple[str, ...], message: str) -> None:
    printed = run(*ESTIMATE, *arguments, "--json")
    assert printed.code == 2
    assert message in printed.json["error"]["message"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_what_does_not_fit_ends_as_a_search_that_finds_nothing(
    run: Run, form: tuple[str, ...]
) -> None:
    printed = run(*ESTIMATE, "--device", "cpu", "--mem", "0.0002", "--no-alternatives", *form)
    assert printed.code == 3
    assert run(*ESTIMATE, "--device", "cpu", "--mem", "8", "--no-alternatives", *form).code == 0


PLAN = ("estimate", "--model", "tiny-llama", "--task", "grpo", "--gpu", "rtx-4090")


def test_a_plan_says_what_fits_and_prints_the_keys_of_trl(run: Run, tmp_path: Path) -> None:
    sizes = ("--prompt-len", "16", "--completion-len", "32", "--effective-batch", "8")
    printed = run(*PLAN, *sizes)
    assert printed.code == 0
    assert "planned, not searched: nothing was measured" in " ".join(printed.out.split())
    assert "\nnum_generations: 8\n" in printed.out

    file = tmp_path / "grpo.yaml"
    answer = run(*PLAN, *sizes, "--vllm", "none", "--out", str(file), "--json").json
    assert (answer["measured"], answer["fits"]) == (False, "yes")
    assert answer["trl"] == file.read_text()
    assert answer["recommended"]["use_vllm"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN, "--seq-len", "64"), "--seq-len says nothing of a plan for grpo"),
        ((*PLAN[:-2], "--gpu", "list"), "a plan for grpo is of one card"),
        ((*PLAN, "--generations", "5"), "5 generations do not divide"),
        ((*ESTIMATE, "--gpu", "h100", "--vllm", "none"), "only a plan for --task grpo takes vllm"),
        (("search", *PLAN[1:]), "grpo generates its samples, and is planned, not searched"),
    ],
    ids=lambda each: each[-1] if isinstance(each, tuple) else "",
)
@pytest.mark.usefixtures("here")
def test_what_is_no_plan(run: Run, arguments: tuple[str, ...], message: str) -> None:
    printed = run(*arguments, "--json")
    assert printed.code == 2
    assert message in printed.json["error"]["message"]
