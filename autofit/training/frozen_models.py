"""Models that the loss asks beside the trained one: a copy of it, a teacher. They are not
trained."""

import copy
from functools import partial

from torch import nn

from autofit.core.knobs.reference import COPIED
from autofit.core.workload import REFERENCE
from autofit.setup import Setup
from autofit.setup.state import modes_of, set_modes
from autofit.training.meta_model import meta_model_from


def make_frozen_models(setup: Setup) -> None:
    """Make the models that the workload names, before anything changes the trained one.

    None is made where a knob says that the loss finds the answers elsewhere.
    """
    is_meta = any(weight.is_meta for weight in setup.model.parameters())
    for name, factory in setup.workload.frozen.items():
        if factory is None and name == REFERENCE and setup.config.reference not in COPIED:
            continue

        if factory is None:
            model = copy.deepcopy(setup.model)
        elif is_meta:  # of random weights, or none
            model = meta_model_from(factory)
        else:
            model = factory()
        setup.frozen[name] = model
        _freeze(setup, model)


def _freeze(setup: Setup, model: nn.Module) -> None:
    """Run a model without dropout and gradients, until the setup is closed: it may be the
    user's."""
    modes = modes_of(model)
    setup.on_close(lambda: set_modes(modes))
    for weight in model.parameters():
        setup.on_close(partial(weight.requires_grad_, weight.requires_grad))

    model.eval()
    model.requires_grad_(False)
