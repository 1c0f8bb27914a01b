import json
from pathlib import Path

import pytest

from benchmarks.gpu import peers, search, usual
from benchmarks.gpu.bench import Ended
from benchmarks.gpu.peers import OURS, STAGE
from benchmarks.gpu.store import Row
from tests.benchmarks.gpu.rows import bench_in, measurement
from tests.tiny import llama_workload


def peer(speed: float | None, **more: object) -> Row:
    timed = {"tokens_per_second": speed} if speed else {}
    return {
        "batch_size": 4,
        "tried": [4],
        "out_of_memory": 0,
        "seconds": 1.0,
        "reason": None,
        **timed,
        **more,
    }


def test_the_ratio_is_over_the_best_peer(tmp_path: Path) -> None:
    store = bench_in(tmp_path).store
    store.add(STAGE, "trainer", peer(100.0))
    store.add(STAGE, "accelerate", peer(120.0))
    store.add(
        STAGE,
        "torch defaults",
        {**peer(None), "batch_size": None, "reason": "memory runs out with one sample"},
    )
    store.add(STAGE, "lightning", {"left_out": "lightning takes no part."})
    assert "over the best peer" not in peers.summarize(store).figures
    store.add(STAGE, OURS["lora"], {"measurement": measurement(180.0)})
    summary = peers.summarize(store)
    assert summary.figures["best peer"] == "accelerate"
    assert summary.figures["over the best peer"] == pytest.approx(1.5)
    assert [row[-1] for row in summary.tables[0].rows] == ["x 1.80", "x 1.50", None, None]
    assert "lightning takes no part." in summary.notes
    assert "torch defaults: memory runs out with one sample" in summary.notes


def test_what_the_search_measured_nothing_of_the_peers_kind_for_is_searched_quickly_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, asked = bench_in(tmp_path), []
    answer = dict.fromkeys(("best", "tiers", "trials", "skipped", "stopped_by", "space_size"))
    best = {"config": {"lora_rank": 16}}
    said = json.dumps({**answer, "best": best, "search_seconds": 40.0, "notes": []})

    def command(arguments: list[str], seconds: float) -> Ended:
        asked.append(arguments)
        return Ended(0, said, "")

    monkeypatch.setattr(search, "python", command)
    assert [peers._like_peers(bench) for _ in range(2)] == [best] * 2
    (arguments,) = asked
    assert "--fast" in arguments
    assert {"--set=quantization=none", "--set=lora_rank=16"} < set(arguments)
    assert not peers.summarize(bench.store).tables  # it is no peer


def test_a_peer_is_asked_once_and_then_timed_at_a_divisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, asked = bench_in(tmp_path), []

    def answer(
        _: object, function: object, workload: object, tool: str, *more: object, **__: object
    ) -> Row:
        asked.append((function, more[1:]))
        return (
            peer(None) | {"batch_size": 3}
            if function is peers.settled
            else {"tokens_per_second": 9.0, "seconds": [1]}
        )

    monkeypatch.setattr(peers, "_asked", answer)
    for _ in range(2):
        peers._peer(bench, llama_workload(4), "trainer", 1000)
    assert [function for function, _ in asked] == [peers.settled, peers.timed]
    row = bench.store.get(STAGE, "trainer")
    assert row
    assert (row["micro_batch_size"], row["seconds"], row["step_seconds"]) == (2, 1.0, [1])


@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize(
    "tool", [usual.TRAINER, "accelerate", usual.TORCH, usual.TORCH_CHECKPOINTED]
)
def test_every_peer_settles_within_its_bytes_and_is_timed(tool: str) -> None:
    workload = llama_workload(4)
    ample = usual.settled(workload, tool, 1 << 30, "cpu")
    assert ample["reason"] is None
    assert ample["out_of_memory"] == 0
    assert ample["batch_size"] in ample["tried"]
    none = usual.settled(workload, tool, 1000, "cpu")
    assert (none["batch_size"], bool(none["reason"])) == (None, True)
    timed = usual.timed(workload, tool, 1 << 30, "cpu", 2)
    assert timed["tokens_per_second"] > 0
    assert len(timed["seconds"]) == 3


def test_names_of_peers_are_those_of_the_tools() -> None:
    assert {usual.TRAINER, usual.TORCH, usual.TORCH_CHECKPOINTED} < set(peers.PEERS)
    assert set(peers.REHEARSED) < set(peers.PEERS)
    assert peers.RANK == usual.RANK
