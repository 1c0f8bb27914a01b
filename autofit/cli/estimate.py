"""`autofit estimate`, and the estimate that stands for a search where probes cannot run."""

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
from autofit.core.errors import InputError, ProbeError
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
        cards = heavy("autofit.nearby", "fitting_cards")(model, config, **asked)
        print_json(cards) if as_json else Console().print(cards_table(cards))
        return 0
    prediction = heavy("autofit.predict", "ask")(
        model, config, gpu=gpu, gpu_mem=gpu_mem, device=device, mem=mem, **asked
    )
    answer = prediction.to_dict()
    if not as_json:  # before the rest, which takes longer
        Console().print(estimate_table(answer))
    if alternatives or (alternatives is None and not as_json):
        answer |= heavy("autofit.nearby", "around")(prediction)
        if not as_json:
            Console().print(around_table(answer))
    if as_json:
        print_json(answer)
    return 0


def print_expected(error: ProbeError, found: Any, *, as_json: bool, as_markdown: bool) -> int:
    """Nothing can be measured for the card here: say so, and what is expected on it; in Markdown as it stands."""
    if as_json:
        told = {"message": error.message, "remedy": error.remedy}
        predicted = found and {"config": dict(found.estimate.config), "estimate": found.to_dict()}
        print_json({"schema": 1, "best": None, "predicted": predicted, "error": told})
    else:
        Console(stderr=True, soft_wrap=True).print(f"autofit: {error}", markup=False, highlight=False)
        said = "expected to be the fastest that fits, not measured:" if found else "no config is expected to fit."
        Console().print(said, highlight=False)
        if found is not None:
            print("\n```text\n" if as_markdown else "", end="")
            Console().print(estimate_table(found.to_dict()))
            print("```\n" if as_markdown else "", end="")
    return error.exit_code
