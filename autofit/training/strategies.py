"""Which strategy of the training step a setup has."""

from autofit.setup import Setup
from autofit.training.pipeline import Pipeline
from autofit.training.strategy import DataParallel, SingleDevice


def strategy_of(setup: Setup) -> SingleDevice:
    """The strategy for the way in which the devices of a setup share the training."""
    if setup.part is not None:
        return Pipeline(setup)
    if setup.ranks.are_several:
        return DataParallel(setup)
    return SingleDevice(setup)
