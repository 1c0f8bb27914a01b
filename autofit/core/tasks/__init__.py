"""The registry of tasks, in the order in which the classes of a config.json are looked up: BART's is listed for masked
language models, too. A new task is a file here and its line below."""

from autofit.core.task import Task
from autofit.core.tasks.audio_classification import AUDIO_CLASSIFICATION
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.ctc import CTC
from autofit.core.tasks.custom import CUSTOM
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.core.tasks.distill import DISTILL
from autofit.core.tasks.dpo import DPO
from autofit.core.tasks.embed import EMBED
from autofit.core.tasks.generative_rerank import GENERATIVE_RERANK
from autofit.core.tasks.grpo import GRPO
from autofit.core.tasks.image_classification import IMAGE_CLASSIFICATION
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.kto import KTO
from autofit.core.tasks.masked_lm import MASKED_LM
from autofit.core.tasks.object_detection import OBJECT_DETECTION
from autofit.core.tasks.orpo import ORPO
from autofit.core.tasks.question_answering import QUESTION_ANSWERING
from autofit.core.tasks.rerank import RERANK
from autofit.core.tasks.reward import REWARD
from autofit.core.tasks.semantic_segmentation import SEMANTIC_SEGMENTATION
from autofit.core.tasks.seq2seq import SEQ2SEQ
from autofit.core.tasks.sequence_classification import SEQUENCE_CLASSIFICATION
from autofit.core.tasks.simpo import SIMPO
from autofit.core.tasks.speech_seq2seq import SPEECH_SEQ2SEQ
from autofit.core.tasks.token_classification import TOKEN_CLASSIFICATION
from autofit.core.tasks.video_classification import VIDEO_CLASSIFICATION

_ALL = (
    CAUSAL_LM,
    SPEECH_SEQ2SEQ,
    SEQ2SEQ,
    MASKED_LM,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    QUESTION_ANSWERING,
    IMAGE_CLASSIFICATION,
    SEMANTIC_SEGMENTATION,
    OBJECT_DETECTION,
    VIDEO_CLASSIFICATION,
    AUDIO_CLASSIFICATION,
    CTC,
    IMAGE_TEXT_TO_TEXT,
    EMBED,
    DPO,
    SIMPO,
    ORPO,
    KTO,
    GRPO,
    REWARD,
    RERANK,
    GENERATIVE_RERANK,
    DISTILL,
    DIFFUSION,
    CUSTOM,
)
TASKS = {task.name: task for task in _ALL}
TASK_NAMES = tuple(TASKS)[:-1]  # what a model named can be trained for


def task_named(name: object) -> Task:
    """The task of that name; `custom` for any other, as a file of another version may hold."""
    return TASKS.get(str(name), CUSTOM)


def task_of(model: object) -> Task:
    """The task of a transformers model, also inside a PeftModel, by the name of its class; `custom` for any other."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) and hasattr(model, "peft_config") else model
    return task_of_class(type(base).__name__)


def task_of_class(name: str) -> Task:
    """The task that the name of a class tells; `custom` where it tells none."""
    return next((task for task in _ALL if name.endswith(task.class_endings)), CUSTOM)
