"""Training for quantised inference: linear layers that round their weights and inputs as that will.

torchao's layers take the place of plain ones (QAT, pytorch.org/blog/quantization-aware-training).
What is trained stays as wide as it was; each product makes rounded copies of a weight and of its
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from autofit.core.errors import InputError, is_whole, require, shown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class FakeQuantisation:
    """Weights in int4, each group of a row with a scale of its own.

    Attributes:
        group_size: the weights of a group.
        of_inputs: whether what layers read is rounded to int8, too, by token.
        of_head: whether the output head rounds; a fused loss reads its weight as it is.
    """

    group_size: int = 32
    of_inputs: bool = True
    of_head: bool = True

    @classmethod
    def of_source(cls, value: object) -> Self | None:
        """As `to_source` wrote it; None of nothing.

        Raises:
            InputError: the value is anything else.
        """
        if value is None:
            return None
        require(
            isinstance(value, Mapping),
            "fake quantisation must hold values by name",
            value,
        )
        assert isinstance(value, Mapping)
        found = value.get("group_size")
        require(is_whole(found, 1), "group_size must be a positive whole number", found)
        assert isinstance(found, int)

        return cls(
            found,
            value.get("of_inputs") is True,
            value.get("of_head") is not False,
        )

    def to_source(self) -> dict[str, Any]:
        """As plain data."""
        source: dict[str, Any] = {
            "group_size": self.group_size,
            "of_inputs": self.of_inputs,
        }
        if not self.of_head:
            source["of_head"] = False

        return source

    def apply(self, model: nn.Module) -> None:
        """Put torchao's layers in the place of all linear ones, which keep their weights.

        Raises:
            InputError: torchao is not there, or rows of a weight are no whole number of groups.
        """
        from torch.nn import Linear

        try:
            import torch
            from torchao.quantization import quantize_
            from torchao.quantization.qat import QATConfig
            from torchao.quantization.qat.fake_quantize_config import (
                Int4WeightFakeQuantizeConfig,
                IntxFakeQuantizeConfig,
            )
        except ImportError as error:
            message = "training for quantised inference takes torchao, which is not installed."
            raise InputError(message, "Install it: pip install torchao.") from error

        theirs: Any = model
        head = None if self.of_head else theirs.get_output_embeddings()
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Linear) and module is not head
        }
        for name, layer in linears.items():
            if layer.in_features % self.group_size:
                message = (
                    f"{name} reads {shown(layer.in_features)} numbers, which are no whole number of "
                    f"groups of {self.group_size}."
                )
                raise InputError(message, "Choose another group_size.")

        weight: Any = Int4WeightFakeQuantizeConfig(group_size=self.group_size)
        inputs: Any = None
        if self.of_inputs:
            weight = Int4WeightFakeQuantizeConfig(
                group_size=self.group_size, activation_dtype=torch.bfloat16
            )
            inputs = IntxFakeQuantizeConfig(
                dtype=torch.int8,
                granularity="per_token",
                is_symmetric=False,
            )

        config = QATConfig(weight_config=weight, activation_config=inputs)
        quantize_(model, config, lambda module, name: name in linears)

        # which torchao makes anew on the meta device, and so unties
        for name, layer in linears.items():
            rounding: Any = model.get_submodule(name)
            rounding.weight = layer.weight
