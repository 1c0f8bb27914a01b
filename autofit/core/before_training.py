"""What is computed once, before the first step, and so is in no step's time."""

from autofit.core.config import Config


def share_before_training(config: Config) -> float:
    """What asking the model of a sample before training takes, as a share of a step over it.

    That is one forward. A step is a forward and a backward: of twice the products where all weights
    are trained, of as many beside frozen ones; and a forward more where activations are recomputed.
    """
    if config.reference != "precomputed":
        return 0.0

    forwards = 3.0
    if config.lora_rank:
        forwards = 2.0
    if config.activation_checkpointing != "none":
        forwards += 1.0
    return 1 / forwards


def pass_note(config: Config) -> str | None:
    """A sentence on that, for who reads speeds."""
    share = share_before_training(config)
    if not share:
        return None
    return (
        f"reference precomputed: before the first step the model is asked once of all data, which "
        f"takes about {share:.0%} of the time of an epoch's steps. Speeds do not count it; the "
        f"choice counts one epoch."
    )
