"""Presets that stand for models whose config.json cannot be reached: the same one, or one as large."""

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from autofit.core.errors import InputError
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.masked_lm import MASKED_LM
from autofit.models.presets import Preset, load_preset, preset_names

# Words of a name that change its weights and not its sizes.
_OF_WEIGHTS = re.compile(
    r"[-_.](instruct|chat|base|it|pt|hf|bf16|fp16|reasoning|thinking|think|preview|sft|rl|dpo"
    r"|(?<!deepseek[-_.])(?:coder|math)|embedding|reranker|reward|deduped|linearized"
    # DeepSeek's versions have sizes of their own
    r"|(?<!deepseek[-_.])(?<!coder[-_.])(?<!math[-_.])v\d[\d.]*|\d{4})\b",
    re.IGNORECASE,
)
# What publishers write before the name of a model.
_OF_OWNERS = ("meta-", "nvidia-", "c4ai-")
_BILLIONS = re.compile(r"(?<![\dx.a-z])(\d+(?:[._]\d+)?)\s?b\b", re.IGNORECASE)
_MILLIONS = re.compile(r"(?<![\dx.a-z])(\d+)\s?m\b", re.IGNORECASE)
_QUANTISED = re.compile(r"awq|gptq|aqlm|nvfp4|fp4|bnb|int4|int8|4bit|8bit", re.IGNORECASE)

# What the name of a model of each kind has, before that of a decoder of texts with one MLP in a
# block.
_VISION = re.compile(
    r"vl\d*\b|vision|omni|multimodal|pixtral|llava|intern-?vl|ocr|paligemma|idefics"
    r"|molmo|ovis|\d+v\b|-v\b|e\db\b",
    re.IGNORECASE,
)
_SOUND = re.compile(r"audio|voxtral|speech", re.IGNORECASE)  # of which there are no presets
_HYBRIDS = re.compile(
    r"mamba|jamba|bamba|zamba|falcon-h1|lfm|granite-4|nemotron-(h|3|nano|super)|kimi-linear|rwkv",
    re.IGNORECASE,
)
_EXPERTS = re.compile(r"\d+x\d+|-a\d+(\.\d+)?b|\d+e\b|moe|mixtral|dbrx|gpt-oss|maverick|scout")
_WORDS = {"sound": _SOUND, "vision": _VISION, "hybrids": _HYBRIDS, "experts": _EXPERTS}
# Families of decoders, all of whose blocks are attention and one MLP.
_DENSE = (
    *("llama", "qwen", "mistral", "ministral", "phi", "gemma", "codellama", "tinyllama", "yi"),
    *("starcoder", "deepcoder", "cogito", "mimo", "smollm", "olmo", "internlm", "stablelm", "xgen"),
    *("pythia", "vicuna", "openllama", "open-llama", "hunyuan", "nemotron-mini", "command"),
    *("deepseek-llm", "deepseek-coder", "deepseek-math", "baichuan", "chatglm", "glm", "aya"),
    *("falcon", "bloom", "opt", "gpt", "codegen", "mpt", "granite", "exaone", "minicpm", "tulu"),
    *("hermes", "nous-hermes", "openhermes", "zephyr", "openchat", "wizard", "orca", "solar"),
    *("xverse", "aquila", "skywork", "telechat", "mathstral", "codestral", "dolphin", "afm"),
    *("seed-oss", "apertus", "ernie", "minitron", "danube", "h2o-danube", "guanaco", "alpaca"),
)
# Of these model types the blocks are so alike that one stands for any of them, by these layers.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")
_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "lm_head",
)
# What models of the kinds here can be trained for, by their presets' task.
_READ = (CAUSAL_LM.name, MASKED_LM.name, IMAGE_TEXT_TO_TEXT.name)
# Model types that have learnt a vector for each position, and no sample can be longer.
_LEARNT = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "bert", "roberta", "xlm-roberta")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
_MOST = 1.35  # times as large as the other one
_MOST_OF_KIND = 1.6  # where few are of its kind


def stand_in(
    name: str,
    tokens: int,
    *,
    layers: Collection[str] = (),
    task: str | None = None,
    stretches: bool = False,
) -> tuple[str, str | None]:
    """What to give as the model for a hub's name or a directory, and a note where it stands for it.

    Args:
        tokens: of a sample, which it must take.
        layers: the names of those that get adapters, which it must have.
        task: what it is trained for.
        stretches: whether a model that was made for shorter samples will do.

    Raises:
        InputError: its weights are quantised already, or no preset is like it.
    """
    if Path(name).expanduser().is_dir():
        return name, None
    if _QUANTISED.search(name):
        message = f"the weights of {name} are quantised already, and cannot be searched."
        raise InputError(message, "Tune a file of the model as it was published.")

    presets = [preset for preset in map(load_preset, preset_names()) if preset.task in _READ]
    if task == IMAGE_TEXT_TO_TEXT.name:
        presets = [preset for preset in presets if preset.task == task]
    long_enough = [preset for preset in presets if _positions(preset) >= tokens]

    for preset in long_enough:
        if preset.hub and name.lower() == preset.hub.lower():
            return preset.name, None

    same = _same(name, long_enough)
    if same is not None and same.hub is not None:
        return same.name, f"{name} is taken to have the sizes of {same.name}."

    shorter = _same(name, presets)
    wanted = _parameters(name)
    if shorter is not None:
        wanted = shorter.parameters
        if shorter.config["model_type"] in _LEARNT:
            most = _positions(shorter)
            message = f"{name} takes samples of at most {most} tokens, not {tokens}."
            raise InputError(message, "Correct their length, or give another --model.")

    nearest = same
    if nearest is None and wanted is not None:
        nearest = _nearest(_last(name), wanted, long_enough, layers, task)
    if nearest is None and stretches and shorter is not None:
        return shorter.name, f"{name} is taken to have the sizes of {shorter.name}."
    if nearest is None:
        raise _unknown(name, layers)

    size = f"{nearest.parameters / 1e9:.2g}B"
    return nearest.name, (
        f"the config.json of {name} cannot be reached: {nearest.name} ({size}) stands for it; "
        "--model DIRECTORY gives its own."
    )


def _same(name: str, presets: Iterable[Preset]) -> Preset | None:
    """The one of the same sizes by its name: the whole of it, or a part that no other word of the
    name speaks against (Skywork-Reward-V2-Qwen3-8B is a Qwen3-8B)."""
    named = []
    for preset in presets:
        named += [(known, preset) for known in _names(preset)]

    for reduced in (_last, _plain):
        whole = reduced(name)
        for known, preset in named:
            if whole == reduced(known):
                return preset

    plain = _plain(name)
    longest = 0
    found = None
    for known, preset in named:
        part = _plain(known)
        match = re.search(rf"(?<![\w.]){re.escape(part)}(?![\w.])", plain)
        if match is None or len(part) <= longest:
            continue

        rest = plain[: match.start()] + plain[match.end() :]
        if _parameters(rest) is None and _special(rest) is None:
            longest = len(part)
            found = preset

    return found


def _nearest(
    name: str,
    wanted: float,
    presets: list[Preset],
    layers: Collection[str],
    task: str | None,
) -> Preset | None:
    """The preset of the same kind whose size is nearest: first of the same family, then of another
    that is alike; None where none is near."""
    kind = _special(name)
    if task == IMAGE_TEXT_TO_TEXT.name:
        kind = "vision"
    elif kind is None and name.startswith(_DENSE):
        kind = "decoders"
    if kind in (None, "sound"):
        return None

    has_experts = bool(_EXPERTS.search(name))

    def is_alike(preset: Preset) -> bool:
        if "hybrids" in (kind, preset.kind):
            return kind == preset.kind
        if _has_experts(preset) != has_experts:
            return False
        if preset.kind == kind:
            return True
        # Some take images, too, without a word of it in their names.
        return kind != "vision" and preset.kind == "vision" and not _VISION.search(preset.name)

    def is_other(preset: Preset) -> bool:
        if kind == "decoders":
            return preset.config["model_type"] in _PLAIN and set(layers) <= set(_LAYERS)
        return kind != "hybrids" and preset.kind == kind and is_alike(preset)

    def ratio(preset: Preset) -> float:
        return max(preset.parameters, wanted) / min(preset.parameters, wanted)

    def order(preset: Preset) -> tuple[float, bool, int]:
        return round(ratio(preset), 1), preset.kind != kind, -_common(preset.name, name)

    def best(candidates: list[Preset], most: float) -> Preset | None:
        near = [preset for preset in candidates if ratio(preset) <= most]
        return min(near, key=order, default=None)

    own = _family(name)
    of_family = [preset for preset in presets if _family(preset.name) == own and is_alike(preset)]
    found = best(of_family, _MOST) or best(list(filter(is_other, presets)), _MOST)
    if found is None and kind != "decoders":
        found = best(of_family, _MOST_OF_KIND)
    return found


def _special(name: str) -> str | None:
    """Which kind a name says a model is of, if it says that."""
    for kind, words in _WORDS.items():
        if words.search(name):
            return kind

    return None


def _has_experts(preset: Preset) -> bool:
    """Whether it is a mixture of experts, by its kind, its name or its config."""
    if preset.kind == "experts" or _EXPERTS.search(preset.name):
        return True

    text = preset.config.get("text_config", {})
    return any("experts" in key for key in (*preset.config, *text))


def _positions(preset: Preset) -> float:
    """The most tokens that it takes."""
    text = preset.config.get("text_config", {})
    config = {**preset.config, **text}
    for key in _POSITIONS:
        if key in config:
            return int(config[key])

    return math.inf


def _unknown(name: str, layers: Collection[str]) -> InputError:
    """The error that no preset is like a model."""
    having = ""
    others = [layer for layer in layers if layer not in _LAYERS]
    if others:
        having = f" with layers named {', '.join(others)}"

    message = f"the config.json of {name} cannot be reached, and no preset{having} is like it."
    return InputError(message, "Give a directory that holds it: --model DIRECTORY.")


def _names(preset: Preset) -> tuple[str, ...]:
    """All that a preset is called, and models of the same sizes."""
    if preset.hub is None:
        return preset.name, *preset.also
    return preset.name, preset.hub, *preset.also


def _last(name: str) -> str:
    """The last part of a name, as presets are written."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    for owner in _OF_OWNERS:
        last = last.removeprefix(owner)

    return re.sub(r"(?<=\d)_(?=\d)", ".", last).replace("_", "-")


def _plain(name: str) -> str:
    """The last part of a name, without words that say nothing of its sizes."""
    last = _last(name)
    while True:
        shorter = _OF_WEIGHTS.sub("", last)
        if shorter == last:
            return last
        last = shorter


def _common(one: str, other: str) -> int:
    """How many characters two names begin with alike."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1

    return count


def _family(name: str) -> str:
    """The letters that a name begins with."""
    found = re.match(r"[a-z]+", name)
    if found is None:
        return name
    return found[0]


def _parameters(name: str) -> float | None:
    """How many a name says it has."""
    if found := _BILLIONS.search(name):
        return float(found[1].replace("_", ".")) * 1e9
    if found := _MILLIONS.search(name):
        return float(found[1]) * 1e6

    return None
