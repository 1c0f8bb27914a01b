"""`autofit models`."""

from tests.cli.command import Run


def test_models(run: Run) -> None:
    rows = run("models", "--json").json["models"]
    assert {row["name"] for row in rows} >= {
        "llama-3.1-8b",
        "gpt2",
        "bert-base",
        "vit-base",
        "tiny-llama",
    }
    assert {"name", "task", "parameters", "hub"} <= rows[0].keys()
    plain = run("models")
    assert (plain.code, plain.err) == (0, "")
    assert all(row["name"] in plain.out for row in rows)
