"""The place that a launcher gives a process."""

from pathlib import Path

from autofit.core.place import Place, given_place, is_started_again, note_run

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
}
SRUN = {
    "SLURM_JOB_ID": "41007",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08],other1",
}


def test_the_place_among_ranks_of_torchrun() -> None:
    assert given_place(TORCHRUN) == Place(5, 8, 1, 4)
    assert given_place(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None


def test_the_place_in_a_step_of_srun() -> None:
    assert given_place(SRUN) == Place(3, 4, 1, 2, "tcp://gpu07:21007")
    assert given_place(SRUN | {"SLURM_STEP_NODELIST": "alone"}) == Place(
        3, 4, 1, 2, "tcp://alone:21007"
    )


def test_a_shell_in_an_allocation_is_alone() -> None:
    assert given_place({"SLURM_JOB_ID": "41007", "SLURM_NTASKS": "4"}) is None
    assert given_place(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert given_place({}) is None


def test_a_training_that_torchrun_starts_again_is_known(tmp_path: Path) -> None:
    named, other = (
        {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": "0"} for name in ("one", "two")
    )
    unnamed, failed = (
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": count} for count in ("0", "1")
    )
    for environment in (named, unnamed, failed, {}):
        assert not is_started_again(tmp_path / "new", environment)
    assert is_started_again(tmp_path, failed)
    note_run(tmp_path, named)
    assert is_started_again(tmp_path, named)  # by a node that came later, too
    assert not any(is_started_again(tmp_path, environment) for environment in (other, unnamed, {}))
    note_run(tmp_path, unnamed)
    assert not is_started_again(tmp_path, unnamed)  # every run without a name has this one
