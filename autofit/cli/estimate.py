"""`autofit estimate`."""

from pathlib import Path
from typing import Any

import autofit.cli.options as options
from autofit.cli.output import heavy, print_answer, print_json
from autofit.core.errors import InputError, NothingFitsError
from autofit.core.knobs import check_knobs
from autofit.core.options import (
    loss_options_of,
    parse_settings,
    search_options,
    single_values,
)
from autofit.core.result import knobs_of
from autofit.core.tasks.grpo import GRPO
from autofit.core.workload import check_sizes
from autofit.hardware.catalogue import card, card_prices
from autofit.models import check_task, kind_of
from autofit.report.grpo_plan import grpo_plan_table
from autofit.report.listings import around_table, cards_table, estimate_table, experts_line
from autofit.report.terminal import Terminal

_LATER = (
    "Predicting what other values of the knobs would bring takes minutes for this model; ask for it "
    "with --alternatives."
)


def estimate(
    model: options.Model,
    task: options.Task = None,
    teacher: options.Teacher = None,
    seq_len: options.SeqLen = None,
    resolution: options.Resolution = None,
    frames: options.Frames = None,
    train_text_encoders: options.TrainTextEncoders = False,
    effective_batch: options.EffectiveBatch = None,
    trust_remote_code: options.TrustRemoteCode = False,
    loss_option: options.LossOption = None,
    gpu: options.GpuOrList = None,
    gpu_mem: options.GpuMem = None,
    device: options.Device = None,
    mem: options.Mem = None,
    devices: options.SeveralDevices = "1",
    nodes: options.Nodes = 1,
    link: options.Link = None,
    price: options.Price = None,
    config: options.ConfigFile = None,
    set_: options.Fix = None,
    alternatives: options.Alternatives = None,
    generations: options.Generations = None,
    prompt_len: options.PromptLen = None,
    completion_len: options.CompletionLen = None,
    vllm: options.Vllm = None,
    vllm_tensor_parallel: options.VllmTensorParallel = None,
    beta: options.Beta = None,
    out: options.PlanFile = None,
    as_json: options.Json = False,
) -> int:
    """Predict memory and speed of a config, without a GPU and without weights.

    Examples:
      autofit estimate --model llama-3.1-8b --gpu rtx-4090 --set lora_rank=16
      autofit estimate --model llama-3.1-8b --gpu list --devices 1,2,4,8 --price prices.yaml
      autofit estimate --model llama-3.1-70b --gpu h100 --devices 8 --nodes 2
      autofit estimate --model qwen2.5-1.5b --task grpo --completion-len 1024 --gpu rtx-4090
    """
    settings = parse_settings(set_ or [])
    named = None if gpu == "list" else gpu
    numbers = [number.strip() for number in devices.split(",")]
    budget = {"gpu_mem": gpu_mem, "device": device, "mem": mem}
    given: dict[str, Any] = {"gpu": named, "nodes": nodes, "link": link, "set": settings}
    if named is not None:
        card(named)
    for number in numbers:
        search_options(**budget, **given, devices=number)
    prices = None if price is None else card_prices(price)
    check_task(task)
    check_sizes(seq_len, 1 if effective_batch is None else effective_batch)

    knobs = single_values(settings)
    if config is not None:
        knobs = {**knobs_of(config), **knobs}
    if kind_of(model) != "function":  # which may register knobs
        check_knobs(knobs)

    generation = {
        "generations": generations,
        "prompt_len": prompt_len,
        "completion_len": completion_len,
        "vllm": vllm,
        "vllm_tensor_parallel": vllm_tensor_parallel,
        "beta": beta,
        "output": out,
    }
    generation = {name: value for name, value in generation.items() if value is not None}
    if task == GRPO.name:
        given |= {**budget, **generation, "trust_remote_code": trust_remote_code}
        if effective_batch is not None:
            given["effective_batch"] = effective_batch
        refused = {
            "--seq-len": seq_len,
            "--resolution": resolution,
            "--frames": frames,
            "--train-text-encoders": train_text_encoders or None,
            "--price": price,
            "--teacher": teacher,
            "--loss-option": loss_option,
        }
        for name, value in refused.items():
            if value is not None:
                remedy = "Leave it out; --prompt-len and --completion-len say the lengths."
                raise InputError(f"{name} says nothing of a plan for {task}.", remedy)
        if gpu == "list":
            raise InputError(f"a plan for {task} is of one card.", "Name it: --gpu h100.")
        return _plan(model, config, {**given, "devices": devices}, as_json)
    if generation:
        names = ", ".join(name.replace("_", " ") for name in generation)
        message = f"only a plan for --task {GRPO.name} takes {names}."
        raise InputError(message, f"Add --task {GRPO.name}, or leave it out.")

    given |= {
        "task": task,
        "teacher": teacher,
        "seq_len": seq_len,
        "resolution": resolution,
        "frames": frames,
        "train_text_encoders": train_text_encoders,
        "effective_batch": effective_batch,
        "trust_remote_code": trust_remote_code,
        "loss_options": loss_options_of(loss_option),
    }
    if gpu == "list" or len(numbers) > 1 or prices is not None:
        if gpu is None:
            message = "prices and several numbers of devices are of cards of the catalogue."
            raise InputError(message, "Name one (--gpu h100), or all (--gpu list).")
        if any(value is not None for value in budget.values()):
            remedy = "Leave out --gpu-mem, --device and --mem."
            raise InputError("--gpu list is about whole cards.", remedy)

        fitting_cards = heavy("autofit.api.what_if", "fitting_cards")
        cards = fitting_cards(model, config, devices=numbers, prices=prices, **given)
        return print_answer(cards, cards_table(cards), as_json)

    predict = heavy("autofit.api.estimate", "predict")
    # Nothing is measured of a named card, so that this process may be forked.
    processes = None if named else 1
    prediction = predict(
        model,
        config,
        devices=devices,
        processes=processes,
        **budget,
        **given,
    )
    answer = prediction.to_dict()
    code = NothingFitsError.exit_code if answer["fits"] == "no" else 0
    if as_json:
        if alternatives:
            answer |= heavy("autofit.api.what_if", "what_if")(prediction)
        print_json(answer)
        return code

    Terminal().print(estimate_table(answer))  # before the alternatives, which take longer
    if alternatives is None and heavy("autofit.api.what_if", "takes_minutes")(prediction):
        Terminal().print(_LATER)
        return code

    if alternatives is not False:
        experts = heavy("autofit.api.what_if", "with_experts")(prediction)
        if experts:
            Terminal().print(experts_line(experts))
        answer |= heavy("autofit.api.what_if", "what_if")(prediction)
        Terminal().print(around_table(answer))
    return code


def _plan(model: str, config: Path | None, given: dict[str, Any], as_json: bool) -> int:
    """Print the plan of a training that generates, and the config for TRL unless a file gets it."""
    answer = heavy("autofit.api.plan_grpo", "plan_grpo")(model, config, **given).to_dict()
    if as_json:
        print_json(answer)
    else:
        Terminal().print(grpo_plan_table(answer))
        if "output" not in given:
            print(answer["trl"], end="")
    return 0 if answer["fits"] == "yes" else NothingFitsError.exit_code
