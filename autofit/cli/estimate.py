"""`autofit estimate`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from autofit.cli.options import (
    Alternatives,
    ConfigFile,
    Device,
    EffectiveBatch,
    Fix,
    GpuMem,
    GpuOrList,
    Json,
    Mem,
    Model,
    SeqLen,
    TrustRemoteCode,
)
from autofit.cli.output import heavy, print_json
from autofit.core.errors import InputError
from autofit.core.options import parse_settings
from autofit.report import around_table, cards_table, estimate_table


def estimate(
    model: Model,
    seq_len: SeqLen = None,
    effective_batch: EffectiveBatch = None,
    trust_remote_code: TrustRemoteCode = False,
    gpu: GpuOrList = None,
    gpu_mem: GpuMem = None,
    device: Device = None,
    mem: Mem = None,
    config: ConfigFile = None,
    set_: Fix = None,
    alternatives: Alternatives = None,
    as_json: Json = False,
) -> int:
    """Predict memory and speed of a config, without a GPU and without weights.

    Examples:
      autofit estimate --model llama-3.1-8b --gpu rtx-4090 --set lora_rank=16
      autofit estimate --model llama-3.1-8b --gpu list
    """
    asked: dict[str, Any] = {
        "set": parse_settings(set_ or []),
        "seq_len": seq_len,
        "effective_batch": effective_batch,
        "trust_remote_code": trust_remote_code,
    }
    if gpu == "list":
        if any(each is not None for each in (gpu_mem, device, mem)):
            raise InputError("--gpu list is about whole cards.", "Leave out --gpu-mem, --device and --mem.")
        cards = heavy("autofit.api.what_if", "fitting_cards")(model, config, **asked)
        print_json(cards) if as_json else Console().print(cards_table(cards))
        return 0
    prediction = heavy("autofit.api.estimate", "ask")(
        model, config, gpu=gpu, gpu_mem=gpu_mem, device=device, mem=mem, **asked
    )
    answer = prediction.to_dict()
    if not as_json:  # before the rest, which takes longer
        Console().print(estimate_table(answer))
    if alternatives or (alternatives is None and not as_json):
        answer |= heavy("autofit.api.what_if", "around")(prediction)
        if not as_json:
            Console().print(around_table(answer))
    if as_json:
        print_json(answer)
    return 0
