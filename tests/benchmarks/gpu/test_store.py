from pathlib import Path

from benchmarks.gpu.store import Store


def test_rows_come_back_in_their_order_and_the_latest_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "items.jsonl"
    store = Store(path)
    assert store.get("memory", "a") is None
    for key, number in (("a", 1), ("b", 2), ("a", 3)):
        store.add("memory", key, {"n": (number,)})
    again = Store(path)
    assert list(again.rows("memory").items()) == [("a", {"n": [3]}), ("b", {"n": [2]})]
    assert again.rows("memory") == store.rows("memory")


def test_a_line_that_was_cut_off_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    Store(path).add("memory", "a", {"n": 1})
    path.write_text(path.read_text() + '{"stage": "memory", "key": "b", "ro')
    before = path.read_text()
    store = Store(path)
    assert store.rows("memory") == {"a": {"n": 1}}
    assert path.read_text() == before, "whoever only reads changes nothing: somebody may be writing"
    store.add("memory", "c", {"n": 2})
    assert Store(path).rows("memory") == {"a": {"n": 1}, "c": {"n": 2}}


def test_what_another_process_adds_is_there_after_reloading(tmp_path: Path) -> None:
    mine, theirs = Store(tmp_path / "items.jsonl"), Store(tmp_path / "items.jsonl")
    theirs.add("correct", "test", {"outcome": "passed"})
    mine.reload()
    assert mine.get("correct", "test") == {"outcome": "passed"}


def test_forgetting_is_for_good_and_leaves_the_rest(tmp_path: Path) -> None:
    store = Store(tmp_path / "items.jsonl")
    store.add("memory", "good", {})
    store.add("memory", "bad", {"failed": "no"})
    store.add("search", "bad", {"failed": "no"})
    store.forget(["memory"], lambda row: "failed" in row)
    for each in (store, Store(store.path)):
        assert list(each.rows("memory")) == ["good"]
        assert list(each.rows("search")) == ["bad"]
    store.forget(["memory"])
    assert Store(store.path).rows("memory") == {}


def test_whoever_listens_is_told_after_each_row(tmp_path: Path) -> None:
    store, seen = Store(tmp_path / "items.jsonl"), []
    store.added = lambda: seen.append(len(store.rows("memory")))
    store.add("memory", "a", {})
    store.add("memory", "b", {})
    assert seen == [1, 2]
