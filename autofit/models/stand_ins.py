"""Presets that stand for models whose config.json cannot be reached: the same one, or one as large."""

import re
from pathlib import Path

from autofit.core.errors import InputError
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.models import Preset, load_preset, preset_names

# Words of a name that change its weights and not its sizes.
_OF_WEIGHTS = re.compile(
    r"[-_.](instruct|chat|base|it|hf|bf16|fp16|reasoning|thinking|preview|sft|rl|v\d[\d.]*|\d{4})\b",
    re.IGNORECASE,
)
_BILLIONS = re.compile(r"(?<![\dx.])(\d+(?:[._]\d+)?)\s?b\b", re.IGNORECASE)
_MILLIONS = re.compile(r"(?<![\dx.])(\d+)\s?m\b", re.IGNORECASE)
_EXPERTS = re.compile(r"\d+x\d+|-a\d+b|\d+e\b|moe|mixtral|dbrx|gpt-oss|jamba", re.IGNORECASE)
_QUANTISED = re.compile(r"awq|gptq|aqlm|nvfp4|fp4|bnb|int4|int8|4bit|8bit", re.IGNORECASE)
# Families of decoders of texts alone, all of whose blocks are attention and one MLP.
_DENSE = (
    *("llama", "qwen", "mistral", "ministral", "phi", "gemma", "codellama", "tinyllama", "yi"),
    *("starcoder", "deepcoder", "cogito", "mimo", "smollm", "olmo", "internlm", "stablelm"),
    *("pythia", "vicuna", "openllama", "open-llama", "hunyuan", "nemotron-mini", "c4ai-command"),
)
_OF_MORE = re.compile(r"vl\b|vision|omni|audio|mamba|pixtral|llava|e\db\b", re.IGNORECASE)
_MOST = 1.35  # times as large as the other one


def stand_in(name: str, tokens: int) -> tuple[str, str | None]:
    """What to give as the model for a hub's name or a directory, and a note where it stands for it.

    Args:
        tokens: of a sample, which it must take.

    Raises:
        InputError: its weights are quantised already, or no preset is like it.
    """
    if Path(name).expanduser().is_dir():
        return name, None
    if _QUANTISED.search(name):
        message = f"the weights of {name} are quantised already, and cannot be searched."
        raise InputError(message, "Tune a file of the model as it was published.")

    presets = [load_preset(each) for each in preset_names()]
    language = [
        each for each in presets if each.task == CAUSAL_LM.name and _positions(each) >= tokens
    ]
    for preset in language:
        if preset.hub and name.lower() == preset.hub.lower():
            return preset.name, None

    plain = _plain(name)
    for preset in language:
        if plain in (_plain(preset.hub or ""), preset.name):
            return preset.name, f"{name} is taken to have the sizes of {preset.name}."

    wanted = _parameters(name)
    is_dense = any(plain.startswith(family) for family in _DENSE)
    if wanted is None or not is_dense or _EXPERTS.search(name) or _OF_MORE.search(name):
        raise _unknown(name)

    def distance(preset: Preset) -> tuple[float, bool]:
        larger = max(preset.parameters, wanted) / min(preset.parameters, wanted)
        return larger, _family(preset.name) != _family(plain)

    in_family = [each for each in language if _family(each.name) == _family(plain)]
    for candidates in (in_family, language):
        nearest = min(candidates, key=distance, default=None)
        if nearest is not None and distance(nearest)[0] <= _MOST:
            billions = nearest.parameters / 1e9
            return nearest.name, (
                f"the config.json of {name} cannot be reached: {nearest.name} ({billions:.2g}B) "
                "stands for it; --model DIRECTORY gives its own."
            )
    raise _unknown(name)


def _positions(preset: Preset) -> int:
    """The most tokens that it takes."""
    config = preset.config
    return int(config.get("max_position_embeddings") or config.get("n_positions") or 1024)


def _unknown(name: str) -> InputError:
    message = f"the config.json of {name} cannot be reached, and no preset is like it."
    return InputError(message, "Give a directory that holds it: --model DIRECTORY.")


def _plain(name: str) -> str:
    """The last part of a name, without words that say nothing of its sizes."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while True:
        shorter = _OF_WEIGHTS.sub("", last)
        if shorter == last:
            return last.replace("_", "-")
        last = shorter


def _family(name: str) -> str:
    found = re.match(r"[a-z]+", name)
    return found[0] if found else name


def _parameters(name: str) -> float | None:
    """How many a name says it has."""
    if found := _BILLIONS.search(name):
        return float(found[1].replace("_", ".")) * 1e9
    if found := _MILLIONS.search(name):
        return float(found[1]) * 1e6
    return None
