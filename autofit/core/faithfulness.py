"""How faithfully a config learns what full training would learn: by its tier, and by lossy values.

Which values are lossy is a fact of their knobs (`Knob.losses`).
"""

from autofit.core.config import Config
from autofit.core.knobs import KNOBS
from autofit.core.knobs.optimizer import KEEP_SMALL_UPDATES, UNDER_8_BITS
from autofit.core.knobs.precision import BF16_WEIGHTS
from autofit.core.result import tier

_STEPS = {"full": 0, "lora": 1, "qlora": 2, "head": 3}
_LOSSY = {name: knob.losses for name, knob in KNOBS.items() if knob.losses}
# Of full training that rounds away what it learns: below LoRA.
_ROUNDED_STEPS = 2


def tier_steps(config: Config) -> int:
    """How many steps of tier a config is below full training.

    Full training that loses small updates, or keeps its state in less than 8 bits, ranks below
    LoRA: it is an answer where memory forces it.
    """
    name = tier(config)
    if name == "full" and (loses_updates(config) or config.optimizer in UNDER_8_BITS):
        return _ROUNDED_STEPS
    return _STEPS[name]


def cost_in_faithfulness(config: Config) -> tuple[int, int]:
    """By tier, then by lossy values: the larger, the less faithful."""
    return tier_steps(config), losses(config)


def loses_updates(config: Config) -> bool:
    """Whether trained weights are in bf16, without 32-bit copies or stochastic rounding."""
    in_bf16 = config.precision in BF16_WEIGHTS and not config.lora_rank
    return in_bf16 and config.optimizer not in KEEP_SMALL_UPDATES


def losses(config: Config) -> int:
    """How many lossy values a config has; a value may count for more than one."""
    return sum(lossy.get(config.get(name), 0) for name, lossy in _LOSSY.items())
