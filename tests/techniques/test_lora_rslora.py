"""lora_rslora: by how much low-rank updates count."""

from autofit.core.config import Value
from autofit.techniques import canonicalize
from tests import tiny
from tests.techniques.contract import Effect


def beside(value: Value) -> dict[str, Value]:
    return {"lora_rank": 4, "lora_alpha": 8.0}


def shows(effect: Effect) -> None:
    on, off = (
        {
            scale
            for module in setup.model.modules()
            if hasattr(module, "lora_A")
            for scale in module.scaling.values()
        }
        for setup in (effect.setup, effect.off)
    )
    assert (on, off) == ({8 / 2}, {8 / 4})  # over sqrt(4), over 4


def test_it_means_nothing_without_a_rank() -> None:
    assert (
        canonicalize({"lora_rslora": True}, tiny.llama_workload(), tiny.CPU)["lora_rslora"] is False
    )
