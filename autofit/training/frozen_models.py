"""Models that the loss asks beside the trained one: a copy of it, a teacher. They are not trained."""

import copy

from torch import nn

from autofit.core.workload import REFERENCE
from autofit.setup import Setup
from autofit.training.meta_model import meta_model_from


def make_frozen_models(setup: Setup) -> None:
    """Make the models that the workload names, before anything changes the trained one.

    None is made where a knob says that the loss finds the answers elsewhere.
    """
    is_meta = any(weight.is_meta for weight in setup.model.parameters())
    for name, factory in setup.workload.frozen.items():
        if factory is None and name == REFERENCE and setup.config.reference != "resident":
            continue

        if factory is None:
            model = copy.deepcopy(setup.model)
        elif is_meta:  # of random weights, or none
            model = meta_model_from(factory)
        else:
            model = factory()
        setup.frozen[name] = frozen(model)


def frozen(model: nn.Module) -> nn.Module:
    """A model without dropout, whose weights get no gradients."""
    model.eval()
    model.requires_grad_(False)
    return model
