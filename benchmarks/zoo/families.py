"""The families of the zoo: of transformers every one that has a training task, with the task it is most used for."""

from __future__ import annotations

import ast
import copy
import inspect
import runpy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, as_input_error, describe_error

ROOT = Path(__file__).parent
LIBRARIES = ("timm", "torchvision", "diffusers", "sentence_transformers")

# The tasks by their mappings in transformers; a family is of the first that has it.
TASKS = {
    "SPEECH_SEQ_2_SEQ": "speech-seq2seq",
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq",
    "IMAGE_TEXT_TO_TEXT": "image-text-to-text",
    "CTC": "ctc",
    "MASKED_LM": "masked-lm",
    "CAUSAL_LM": "causal-lm",
    "OBJECT_DETECTION": "object-detection",
    "SEMANTIC_SEGMENTATION": "semantic-segmentation",
    "IMAGE_CLASSIFICATION": "image-classification",
    "VIDEO_CLASSIFICATION": "video-classification",
    "AUDIO_CLASSIFICATION": "audio-classification",
    "SEQUENCE_CLASSIFICATION": "sequence-classification",
    "TOKEN_CLASSIFICATION": "token-classification",
    "QUESTION_ANSWERING": "question-answering",
}
# Families that get a row for a task that is not the first they have.
ALSO = {
    "token-classification": {
        "bert": "BertForTokenClassification",
        "deberta-v2": "DebertaV2ForTokenClassification",
    },
    "question-answering": {
        "bert": "BertForQuestionAnswering",
        "distilbert": "DistilBertForQuestionAnswering",
    },
    "sequence-classification": {
        "llama": "LlamaForSequenceClassification",
        "bert": "BertForSequenceClassification",
    },
    "audio-classification": {"wav2vec2": "Wav2Vec2ForSequenceClassification"},
    "embed": {"bert": "BertModel", "mpnet": "MPNetModel", "qwen3": "Qwen3Model"},
}
# One of each task goes through the real command line, too.
BY_COMMAND = (
    *(
        "llama/causal-lm",
        "bert/masked-lm",
        "t5/seq2seq",
        "whisper/speech-seq2seq",
        "hubert/ctc",
        "bert/embed",
    ),
    *(
        "llava/image-text-to-text",
        "yolos/object-detection",
        "segformer/semantic-segmentation",
        "lstm/custom",
    ),
    *("vit/image-classification", "wav2vec2/audio-classification", "llama/sequence-classification"),
    *("bert/token-classification", "bert/question-answering", "vivit/video-classification"),
)
SEQUENCE_LENGTHS = {
    **dict.fromkeys(("seq2seq", "masked-lm", "causal-lm", "embed"), 32),
    **dict.fromkeys(("sequence-classification", "token-classification", "question-answering"), 32),
    "image-text-to-text": 320,  # an image takes up to 256 tokens
}
EFFECTIVE_BATCH_SIZE = 4
_TARGETS = {"labels", "start_positions", "actions"}  # arguments of which a forward computes a loss

_UNTRAINED = "does not support training"  # what the forwards of models say that are there for inference alone


@dataclass(frozen=True)
class Family:
    """One row: a library, what it calls the family, what the family is trained for, and the class of that."""

    library: str
    name: str
    task: str
    architecture: str = ""

    @property
    def key(self) -> str:
        """What the row is called."""
        return f"{self.library}/{self.name}/{self.task}"

    @property
    def by_command(self) -> bool:
        """Whether the real command line searches it, too."""
        return f"{self.name}/{self.task}" in BY_COMMAND


def families() -> tuple[list[Family], list[str]]:
    """All of them, and a line for each library that is not installed."""
    found, lacking = [*_of_plain(), *_interleaved(of_transformers())], []
    for library in LIBRARIES:
        file = ROOT / "libraries" / f"of_{library}.py"
        try:
            with as_input_error(describe_error):
                names = runpy.run_path(str(file))["NAMES"]
        except InputError as error:
            lacking.append(f"{library} is left out: {error}.")
        else:
            found += [Family(library, name, "custom") for name in names]
    return found, lacking


def of_transformers() -> list[Family]:
    """Every model type with a task, each once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Family] = {}
    for mapping, task in TASKS.items():
        for name, architecture in getattr(
            modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"
        ).items():
            architecture = architecture if isinstance(architecture, str) else architecture[0]
            found.setdefault(name, Family("transformers", name, task, architecture))
    others = [
        Family("transformers", name, task, which[name])
        for task, which in ALSO.items()
        for name in which
    ]
    return [*found.values(), *others]


def _interleaved(found: list[Family]) -> list[Family]:
    """One of each task after the other: a run that is ended early has seen all tasks."""
    of_task = {
        task: [each for each in found if each.task == task]
        for task in dict.fromkeys(e.task for e in found)
    }
    return [each for row in zip_longest(*of_task.values()) for each in row if each is not None]


def _of_plain() -> list[Family]:
    """Every workload of the files of plain networks."""
    files = sorted((ROOT / "plain").glob("*.py"))
    return [
        Family(f"plain/{file.stem}", name, "custom") for file in files for name in _workloads(file)
    ]


def _workloads(file: Path) -> list[str]:
    """The public functions of a file that return a workload."""
    functions = (
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    )
    workloads = (
        each
        for each in functions
        if each.returns and ast.unparse(each.returns) == "autofit.Workload"
    )
    return [each.name for each in workloads if not each.name.startswith("_")]


class NotBuiltError(Exception):
    """There is no tiny config from which transformers builds and trains a family; the message says why."""


def written(family: Family, folder: Path) -> tuple[str, dict[str, Any]]:
    """What `--model` takes for a family, written into a folder, and what the command line is told besides. Raises
    NotBuiltError."""
    if family.library in LIBRARIES:
        return f"{ROOT / 'libraries' / f'of_{family.library}.py'}:{family.name}", {}
    if family.library != "transformers":
        return f"{ROOT / family.library}.py:{family.name}", {}
    import torch
    import transformers

    from benchmarks.zoo.shrink import tiny_config

    try:
        model_class = getattr(transformers, family.architecture)
        untrainable = _untrainable(family, model_class)
        if not untrainable:
            config = tiny_config(family.name)
            config.architectures = [family.architecture]
            for key in (
                ("decoder_start_token_id", "pad_token_id") if "seq2seq" in family.task else ()
            ):
                if getattr(config, key, None) is None:
                    setattr(config, key, 0)  # checkpoints say it, and default configs do not
            with torch.device("meta"):
                model_class(copy.deepcopy(config))
    except Exception as error:
        raise NotBuiltError(describe_error(error)) from error
    if untrainable:
        raise NotBuiltError(untrainable)
    path = folder / family.task / family.name
    config.save_pretrained(path)
    options: dict[str, Any] = {"effective_batch_size": EFFECTIVE_BATCH_SIZE}
    if family.task == "embed":  # of which a bare model's class says nothing
        options["task"] = family.task
    if family.task in SEQUENCE_LENGTHS:
        options["sequence_length"] = SEQUENCE_LENGTHS[family.task]
    return str(path), options


def _untrainable(family: Family, model_class: Any) -> str:
    """Why no config of a family makes a model that transformers trains, or ""."""
    from transformers import CONFIG_MAPPING

    if family.task != "embed" and not _TARGETS & {
        *inspect.signature(model_class.forward).parameters
    }:
        return "transformers has no loss for it: its forward takes no labels"
    if _UNTRAINED in inspect.getsource(inspect.unwrap(model_class.forward)):
        return "transformers has no loss for it: its forward refuses labels"
    if model_class.config_class in CONFIG_MAPPING[family.name].sub_configs.values():
        return f"transformers lists a part of it as the whole: {family.architecture} takes the config of a part"
    return ""
