import json
from pathlib import Path

from benchmarks import peer_deepspeed
from benchmarks.peer_deepspeed import found, settings

REFUSED = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


def _experiment(results: Path, number: int, name: str, *, ran: bool = True) -> None:
    folder = results / name
    folder.mkdir(parents=True)
    (folder / "exp.json").write_text(json.dumps({"exp_id": number, "name": name}))
    (folder / "stderr.log").write_text("" if ran else REFUSED)
    if ran:
        (folder / "metrics.json").write_text("{}")


def _optimal(results: Path, size: int) -> None:
    (results / "ds_config_optimal.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": size})
    )


def test_its_answer_is_read_with_what_it_tried(tmp_path: Path) -> None:
    _experiment(tmp_path, 0, "profile_model_info")
    _experiment(tmp_path, 1, "z0_gas1_tmbspg1")
    _experiment(tmp_path, 3, "z0_gas4_tmbspg2")
    _experiment(tmp_path, 2, "z0_gas1_tmbspg8", ran=False)
    _optimal(tmp_path, 2)
    seen = found(tmp_path, "", 12.0)
    assert (seen.batch_size, seen.tried, seen.out_of_memory, seen.seconds) == (
        2,
        (1, 8, 2),
        1,
        12.0,
    )
    assert seen.reason is None


def test_an_optimum_that_did_not_run_is_no_answer(tmp_path: Path) -> None:
    _experiment(tmp_path, 1, "z0_gas1_tmbspg1", ran=False)
    _optimal(tmp_path, 1)
    seen = found(tmp_path, "", 12.0)
    assert seen.batch_size is None
    assert "micro-batch 1 optimal" in (seen.reason or "")


def test_without_an_answer_its_last_words_are_told(tmp_path: Path) -> None:
    said = (
        "[2026-11-21 19:03:42,680] [ERROR] [autotuner.py:701:run] "
        "The model is not runnable with error = no\n[x] done\n"
    )
    assert found(tmp_path, said, 12.0).reason == "The model is not runnable with error = no"
    assert found(tmp_path, "one\nlast\n", 12.0).reason == "last"
    assert found(tmp_path, "", 12.0).reason == "it said nothing"
    assert "did not end" in (found(tmp_path, said, peer_deepspeed.SECONDS).reason or "")


def test_it_is_bounded_by_the_effective_batch_and_trains_in_fp32() -> None:
    given = settings(16)
    assert given["autotuning"]["max_train_batch_size"] == 16
    assert given["optimizer"]["type"] == "AdamW"
    assert not {"fp16", "bf16"} & set(given)
