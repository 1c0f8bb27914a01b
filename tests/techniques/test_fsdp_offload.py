"""fsdp_offload: of fsdp alone; on a CPU nothing is gained by it, so it is not searched."""

from dataclasses import replace

from autofit.techniques import technique_named
from tests.techniques.test_data_parallel import EIGHT, canonical
from tests.tiny import CPU


def test_what_it_is() -> None:
    assert canonical()["fsdp_offload"] is None
    assert canonical(data_parallel="fsdp")["fsdp_offload"] == "none"
    assert canonical(data_parallel="fsdp", fsdp_offload="cpu")["fsdp_offload"] == "cpu"


def test_where_it_is_searched() -> None:
    choices = technique_named("fsdp_offload").choices
    assert choices(CPU) == (None,)
    assert choices(EIGHT) == ("none",)
    assert choices(replace(EIGHT, device="cuda")) == ("cpu", "none")
