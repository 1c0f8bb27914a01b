"""What Configs of a space share: a group of them the segments, a pass the traces it is made of."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.knobs import KNOBS, Trace
from autofit.core.knobs.activation_checkpointing import BUDGET, ways_of_blocks
from autofit.estimate.scaling import Symbols
from autofit.estimate.shallow_model import Depth
from autofit.techniques import technique_named

_SCALED = frozenset(name for name, knob in KNOBS.items() if knob.trace is Trace.SCALED)
# Knobs that do not change the segments, and the values traced instead.
_UNTRACED = {
    name: knob.traced_as or knob.off for name, knob in KNOBS.items() if knob.trace is Trace.UNTRACED
}
_ALIKE = [knob for knob in KNOBS.values() if knob.same_trace or knob.same_work]


def group_key(config: Config) -> tuple[Value, ...]:
    """Identifies the group of a config. `group_of` would take seconds for hundreds of thousands."""
    exact = (value for knob, value in config.items() if knob not in _SCALED)
    return bool(config.lora_rank), *exact


def group_of(config: Config) -> Config:
    """What configs with the same segments have in common: all but the micro-batch and the rank."""
    group = config.replace(micro_batch_size=0, gradient_accumulation_steps=0)
    return group.replace(lora_rank=min(1, config.lora_rank), lora_alpha=None)


def pass_of(config: Config) -> tuple[Value, ...]:
    """Identifies the forward and backward of a config, as `group_key` does its group."""
    return tuple(value for knob, value in config.items() if knob not in _UNTRACED)


def traced_part(config: Config) -> tuple[Value, ...]:
    """What of a config decides about its traces: no other size and no other optimizer needs
    more."""
    parts = config.items()
    traced = (value for knob, value in parts if knob not in _UNTRACED and knob not in _SCALED)

    return bool(config.lora_rank), *traced


def pass_key(config: Mapping[str, Value]) -> Config:
    """What a config's forward and backward depend on."""
    return Config(
        {
            **config,
            **{knob: value for knob, value in _UNTRACED.items() if knob in config},
        }
    )


def interpolation_endpoints(config: Config) -> list[Config]:
    """The configs that a config lies between: full and no recomputation, if it has a budget for
    that."""
    if not config.activation_checkpointing.startswith(BUDGET):
        return [config]
    return [config.replace(activation_checkpointing=value) for value in ("full", "none")]


def kinds_of_blocks(config: Config, depth: Depth) -> list[str]:
    """How each block of the whole model is checkpointed, the last one first."""
    return ways_of_blocks(config.activation_checkpointing, depth.whole)[::-1]


@dataclass(frozen=True)
class TraceKeys:
    """What is traced for configs on some hardware: for alike ones the same.

    Attributes:
        symbols: in place of sizes.
        refused: by knob the values that this hardware cannot have, so that nothing is traced as
            them: bfloat16, say, on cards before Ampere.
    """

    symbols: Symbols
    refused: Mapping[str, Collection[Value]]

    @classmethod
    def on(cls, hardware: Hardware, symbols: Symbols) -> Self:
        """For some hardware."""
        refused = {}
        for knob in _ALIKE:
            offered = technique_named(knob.name).choices(hardware)
            targets = {*knob.same_trace.values(), *knob.same_work.values()}
            refused[knob.name] = targets.difference(offered)

        return cls(symbols, refused)

    def plain(self, config: Config) -> Config:
        """What is traced for a config's blocks without checkpointing, in its own weight format."""
        plain = ("loss", "activation_checkpointing", "attention", "kernels")
        off = {name: KNOBS[name].off for name in plain}

        return self.of(config, exact_weights=True, **off)

    def others(
        self,
        config: Config,
        depth: Depth | None,
        *,
        by_flash: bool,
        asks_others: bool = False,
    ) -> tuple[Config, ...]:
        """What is traced for a pass besides its plain blocks: the head, then the blocks (by
        `kinds_of_blocks`), or the whole model if the plain blocks have no `depth`.

        Args:
            by_flash: PyTorch computes the attention of the plain blocks by flash anyway.
            asks_others: logits are computed before the blocks run, too, those of models that are
                not trained.
        """
        if by_flash and config.attention == "flash":
            config = config.replace(attention="sdpa")
        if depth is None:
            return (self.of(config),)

        head = self.of(config, activation_checkpointing="none", attention="sdpa")
        if config.data_parallel != "fsdp":  # which in the head gives back the last block's weights
            head = head.replace(quantization="none")  # the head is never quantised

        blocks = self.of(config)
        if not asks_others:
            blocks = blocks.replace(loss="standard")

        ways = kinds_of_blocks(config, depth)

        return head, *(blocks.replace(activation_checkpointing=way) for way in dict.fromkeys(ways))

    def of(self, config: Config, *, exact_weights: bool = False, **replaced: Value) -> Config:
        """What is traced for a config. With `exact_weights` formats of other sizes are not the
        same."""
        knobs = dict(config)
        for knob in _ALIKE:
            same = knob.same_trace if exact_weights else {**knob.same_trace, **knob.same_work}
            value = config.get(knob.name)
            traced = same.get(value, value)
            if traced not in self.refused[knob.name]:
                knobs[knob.name] = traced

        rank = self.symbols.rank if config.lora_rank else 0
        sizes = {"micro_batch_size": self.symbols.samples, "gradient_accumulation_steps": 1}
        key = pass_key({**knobs, **sizes})

        return key.replace(lora_rank=rank, lora_alpha=None, **replaced)
