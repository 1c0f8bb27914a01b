"""What low-rank adapters can hold of the data that they learn.

A trained parameter holds about two bits (Allen-Zhu & Li 2024, arXiv 2404.05405), and a token has
about one to learn (Schulman et al. 2025, "LoRA without regret").
"""

from autofit.core.config import Config
from autofit.core.errors import pluralize
from autofit.core.workload import Workload

_BITS_OF_PARAMETER = 2
_BITS_OF_TOKEN = 1
_RANKS = (8, 16, 32, 64, 128, 256)


def smallest_rank(workload: Workload) -> int | None:
    """The smallest rank whose adapters, beside all linear layers, hold what the data have to teach.

    None where the data or the layers are not known; 256 where no rank suffices.
    """
    of_each_rank = workload.traits.adapter_parameters if workload.traits else 0
    if not workload.data_tokens or not of_each_rank:
        return None

    for rank in _RANKS:
        if _is_enough(rank * of_each_rank, workload.data_tokens):
            return rank
    return _RANKS[-1]


def capacity_note(workload: Workload, config: Config) -> str | None:
    """A sentence that weighs the tokens of the data against the parameters that LoRA trains.

    None where one of the two is not known, or another part of the model is trained.
    """
    tokens = workload.data_tokens
    trained = workload.traits.adapter_parameters if workload.traits else 0
    trained *= config.lora_rank
    if not tokens or not trained or config.lora_targets != "all-linear":
        return None

    text = (
        f"LoRA trains {pluralize(trained, 'parameter')}, of about {_BITS_OF_PARAMETER} bits each; "
        f"the data have {pluralize(tokens, 'token')}, of about {_BITS_OF_TOKEN} to learn"
    )
    if _is_enough(trained, tokens):
        return f"{text}: it can learn what full training does."
    return f"{text}: full training can learn more of them."


def _is_enough(parameters: int, tokens: int) -> bool:
    return _BITS_OF_PARAMETER * parameters >= _BITS_OF_TOKEN * tokens
