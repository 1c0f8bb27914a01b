"""The plan of a quarter of an hour, which can be read without a card."""

import re

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.cases import FIRST
from benchmarks.gpu.listed import read_list


def planned(capsys: pytest.CaptureFixture[str], minutes: int) -> str:
    assert run.main(["--plan", str(minutes)]) == 0
    return capsys.readouterr().out


def test_each_step_is_told_with_its_time_and_what_it_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = planned(capsys, 15)
    for case in read_list(FIRST):
        assert f"first.sh: {case.name}" in told
        assert case.tells in told
    begins = [
        60 * int(minute) + int(second)
        for minute, second in re.findall(r"^ *(\d+):(\d\d) ", told, re.MULTILINE)
    ]
    assert begins == sorted(begins)
    assert begins[-1] <= 15 * 60 - 170, "second.sh has its time"


def test_what_there_is_no_time_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, 8).count("no time") > planned(capsys, 15).count("no time")
    assert "no time" not in planned(capsys, 60)
