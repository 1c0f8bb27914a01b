"""The state that a model needs in every training step, whatever the config.

This is its modes, no cache of keys and values, and no checkpointing of its own. `Setup.close` gives
the model back as it was.

It stands apart from the techniques, because no knob may decide whether a step computes the same.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from autofit.setup import Setup
from autofit.setup.state import modes_of, set_modes

# of transformers and diffusers; of timm
_OWN_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
_NAMED = 3  # modules that a sentence names


def set_for_training(setup: Setup) -> None:
    """Put the model of a setup into the state in which it is trained, until the setup is closed."""
    _set_modes(setup)
    _switch_off_caches(setup)
    _switch_off_own_checkpointing(setup)


def stays_in_eval(model: nn.Module) -> list[str]:
    """The names of the outermost submodules that training leaves in eval mode.

    These are all that are in it, where the model itself is in train mode. A model in eval mode, as
    `from_pretrained` returns it, is trained in train mode altogether; of one that peft wrapped, the
    wrapped model's mode decides.
    """
    wrapped = model
    unwrap = getattr(model, "get_base_model", None)
    if callable(unwrap):
        wrapped = unwrap()
    if not (model.training and wrapped.training):
        return []

    names: list[str] = []
    for name, module in model.named_modules():
        # what is inside follows at once
        is_inside = bool(names) and name.startswith(f"{names[-1]}.")
        if not module.training and not is_inside:
            names.append(name)
    return names


def _set_modes(setup: Setup) -> None:
    """Train in train mode, but for what the user froze in eval mode."""
    model = setup.model
    given = modes_of(model)
    setup.on_close(lambda: set_modes(given))
    frozen = stays_in_eval(model)

    model.train()  # also where it is: a class's own `train` may leave parts in eval mode
    if frozen:
        set_modes({module: False for module, is_training in given.items() if not is_training})
        names = ", ".join(frozen[:_NAMED])
        if len(frozen) > _NAMED:
            names += f" and {len(frozen) - _NAMED} more"
        setup.warnings.append(
            f"{names}: given in eval mode in a model in train mode, and stays so, without dropout "
            "and with stored statistics; call model.train() before, if that is not meant."
        )
    setup.modes = modes_of(model)


def _switch_off_caches(setup: Setup) -> None:
    """Train without a cache of keys and values, which serves generation alone.

    It hides restarted positions, by which packed samples are kept apart (transformers makes that
    mask only without a cache), and a block that is computed again for the backward would fill it
    again.
    """
    configs = [config for model in setup.all_models() for config in _configs(model)]
    for config in configs:
        if getattr(config, "use_cache", False):
            setup.patch(config, "use_cache", False)

    caches = sys.modules.get("transformers.cache_utils")
    if configs and caches:  # XLM makes a cache whatever its config says
        update = _unless_trained(caches.Cache.update)
        setup.step_contexts.append(lambda: mock.patch.object(caches.Cache, "update", update))


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every config of transformers that a module holds, each once.

    Includes those inside others, as of a text model beside a vision tower.
    """
    waiting = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        is_config = hasattr(config, "model_type") and hasattr(config, "__dict__")
        if is_config and id(config) not in seen:
            seen.add(id(config))
            yield config
            waiting.extend(vars(config).values())


def _unless_trained(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A cache's update that keeps no keys and values of training, but hands them on."""

    def update(
        cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **options: Any
    ) -> Any:
        if torch.is_grad_enabled() and not cache.get_seq_length(layer):
            return keys, values
        return plain(cache, keys, values, layer, *args, **options)

    return update


def _switch_off_own_checkpointing(setup: Setup) -> None:
    """Let `activation_checkpointing` alone decide what is computed again.

    Beside the model's own, `none` would not be none, and with `full` every block would run once
    more.
    """
    is_found = False
    for module in setup.model.modules():
        for name in _OWN_CHECKPOINTING:
            if getattr(module, name, False) is True:
                setup.patch(module, name, False)
                is_found = True
        if isinstance(module, CheckpointWrapper):
            setup.patch(module, "checkpoint_fn", _called)
            is_found = True

    if is_found:
        setup.warnings.append(
            "the model came with activation checkpointing switched on: while it is trained here, "
            "the knob activation_checkpointing decides instead."
        )


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function without checkpointing it."""
    return function(*args, **options)
