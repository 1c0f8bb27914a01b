"""pipeline_schedule: of stages alone; 1f1b unless told, and the only one that is searched."""

from autofit.techniques import technique_named
from tests.techniques.test_data_parallel import EIGHT, canonical
from tests.tiny import CPU


def test_what_it_is() -> None:
    assert canonical()["pipeline_schedule"] is None
    assert canonical(pipeline_schedule="gpipe")["pipeline_schedule"] is None
    assert canonical(pipeline_parallel=2)["pipeline_schedule"] == "1f1b"
    staged = canonical(pipeline_parallel=2, pipeline_schedule="gpipe")
    assert staged["pipeline_schedule"] == "gpipe"


def test_where_it_is_searched() -> None:
    choices = technique_named("pipeline_schedule").choices
    assert choices(CPU) == (None,)
    assert choices(EIGHT) == ("1f1b",)
