"""`autofit doctor`."""

import pytest

from tests.cli.command import Run


@pytest.mark.usefixtures("shared_zygote", "here")
def test_doctor(run: Run) -> None:
    found = run("doctor", "--device", "cpu", "--json")
    assert found.code == 0
    assert found.json["hardware"]["device"] == "cpu"
    plain = run("doctor", "--device", "cpu")
    assert "optimizer" in plain.out
    assert plain.err == ""
    assert run("doctor", "--device", "tpu", "--json").code == 2
