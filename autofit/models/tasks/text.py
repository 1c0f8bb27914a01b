"""Synthetic text: random tokens of the largest shape a task can have, which memory and speed depend
on alone.

The factories are plain data, so they reach a probe process, and the same n gives the same batch in
every process. Fake tensors can follow every operation. torch is imported where a batch is made, so
that naming a model stays cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.core.tasks import TASKS
from autofit.core.workload import Rows
from autofit.models.tasks.sizes import Asked, padding, positions

if TYPE_CHECKING:
    import torch

SEED = 0
_CHARACTERS = 0x110000  # of Unicode
_PAGES = ("max_2d_position_embeddings", "dim_bbox")  # keys of models that read pages
_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments of 0 for text
_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments of 0 for text
_REGIONS = 36  # of an image: LXMERT, arXiv:1908.07490
# Kinds of models whose attention, by transformers' masks, sees no other document of a sequence
# where positions start again; the tests compare each with the documents alone. Of others, BLOOM,
# MPT and OPT count positions themselves.
KEEPS_APART = frozenset(
    {
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
# of the tokens in masked-language modelling: BERT, arXiv:1810.04805, section 3.1
MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class ClassLabels:
    """Labels of a classifier as transformers expects them for each `problem_type`."""

    classes: int
    problem_type: str = "single_label_classification"

    def __call__(self, n: int, generator: torch.Generator) -> torch.Tensor:
        """Labels of n samples: class numbers [n], or float targets [n, classes] ([n] for one
        regression output)."""
        import torch

        if self.problem_type == "single_label_classification":
            return torch.randint(self.classes, (n,), generator=generator, device="cpu")
        if self.problem_type == "multi_label_classification":
            return torch.randint(
                2,
                (n, self.classes),
                generator=generator,
                device="cpu",
            ).float()

        shape: tuple[int, ...] = (n, self.classes)
        if self.classes == 1:
            shape = (n,)
        return torch.randn(shape, generator=generator, device="cpu")


@dataclass(frozen=True)
class RandomTokens:
    """n -> random token ids [n, sequence_length] and the labels of the task.

    No attention mask: every position counts, which is the worst case and what transformers assumes
    without one. The padding token is never drawn, because some models take it out of the count of
    positions. In masked-language modelling the first position is always predicted, so no sample is
    empty.

    Attributes:
        zeros: further arguments of that shape that a forward asks for.
        boxes: the type of the places of tokens on their pages, where it takes those.
        regions: the features of a region, where some of an image stand beside the text.
        spectrogram: of the sound beside each token: bins and frames.
        document_tokens: of each of the documents in a sample, whose positions start again; 0: it is
            one.
        sound: codes of sound beside each token, and how many there are to choose from.
    """

    task: str
    sequence_length: int
    vocab_size: int
    pad_token_id: int | None = None
    labels: ClassLabels | None = None
    zeros: tuple[str, ...] = ()
    boxes: str = ""
    regions: int = 0
    spectrogram: tuple[int, int] = (0, 0)
    document_tokens: int = 0
    sound: tuple[int, int] = (0, 0)

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        ids = random_ids(
            (n, self.sequence_length),
            self.vocab_size,
            self.pad_token_id,
            generator,
        )
        batch = {"input_ids": ids, **{name: torch.zeros_like(ids) for name in self.zeros}}
        if self.boxes:
            batch["bbox"] = torch.zeros(
                (*ids.shape, 4),
                dtype=getattr(torch, self.boxes),
                device="cpu",
            )

        if self.spectrogram[0]:
            shape = n, self.spectrogram[0], self.spectrogram[1] * self.sequence_length
            batch["input_features"] = torch.randn(shape, generator=generator, device="cpu")

        if self.sound[0]:
            codes = random_ids(
                (*ids.shape, self.sound[0]),
                self.sound[1],
                None,
                generator,
            )
            batch["input_ids"] = torch.cat([ids[..., None], codes], dim=2)

        if self.regions:
            batch["visual_feats"] = torch.randn(
                (n, _REGIONS, self.regions),
                generator=generator,
                device="cpu",
            )
            batch["visual_pos"] = torch.rand(
                (n, _REGIONS, 4),
                generator=generator,
                device="cpu",
            )

        batch |= self._targets(ids, generator)
        if self.document_tokens:
            positions = torch.arange(self.sequence_length, device="cpu") % self.document_tokens
            batch["position_ids"] = positions.repeat(n, 1)

        return Rows(batch)

    def _targets(self, ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        import torch

        task = TASKS[self.task]
        if task.labels == "class of each token":
            classes = self.labels.classes if self.labels else 2
            return {
                "labels": torch.randint(
                    classes,
                    ids.shape,
                    generator=generator,
                    device="cpu",
                )
            }

        if self.labels is not None:
            return {"labels": self.labels(len(ids), generator)}
        if task.predicts_next_token:
            return {"labels": ids.clone()}
        if task.labels == "other tokens":
            return {
                "labels": random_ids(
                    tuple(ids.shape),
                    self.vocab_size,
                    self.pad_token_id,
                    generator,
                )
            }

        if task.labels == "span":
            ends = torch.randint(
                ids.shape[1],
                (2, len(ids)),
                generator=generator,
                device="cpu",
            )
            return {"start_positions": ends[0], "end_positions": ends[1]}

        masked = torch.rand(ids.shape, generator=generator, device="cpu") < MASKED_FRACTION
        masked[:, 0] = True

        return {"labels": torch.where(masked, ids, -100)}


def random_ids(
    shape: tuple[int, ...],
    vocabulary: int,
    avoided: int | None,
    generator: torch.Generator,
) -> torch.Tensor:
    """Random token ids of a vocabulary, without one of them."""
    import torch

    if avoided is None:
        return torch.randint(vocabulary, shape, generator=generator, device="cpu")

    ids = torch.randint(vocabulary - 1, shape, generator=generator, device="cpu")
    return ids + (ids >= avoided)


def class_labels(config: Any) -> ClassLabels:
    """The kind of labels that transformers' loss expects, by its own rule for configs that do not
    say."""
    default = "single_label_classification"
    if config.num_labels == 1:
        default = "regression"
    return ClassLabels(config.num_labels, config.problem_type or default)


def text_batches(asked: Asked) -> RandomTokens:
    """The batches of a model of text, by its config."""
    task = asked.task
    text = asked.config.get_text_config()
    vocabulary = _CHARACTERS  # CANINE hashes them
    if hasattr(text, "vocab_size"):
        vocabulary = asked.size(text, "vocab_size")

    labels = None
    if task.scores or task.reads_two_words:
        labels = ClassLabels(1, "regression")
    elif task.classifies:
        labels = class_labels(asked.config)

    regions = 0
    if hasattr(text, "visual_feat_dim"):
        regions = asked.size(text, "visual_feat_dim")
        if task.labels == "span":  # LXMERT's answers are classes, not parts of the text
            labels = ClassLabels(asked.size(text, "num_qa_labels"))

    sound = (0, 0)
    if hasattr(text, "codebook_vocab_size"):  # Kyutai's models hear while they write
        codebooks = asked.size(text, "num_codebooks")
        sound = (codebooks, asked.size(text, "codebook_vocab_size"))

    spectrogram = (0, 0)
    frames = getattr(asked.config, "audio_length_per_tok", 0)  # and Voxtral's
    if frames:
        spectrogram = (asked.size(asked.config.audio_config, "num_mel_bins"), frames)

    boxes = ""
    if any(hasattr(text, key) for key in _PAGES):
        boxes = "long"
        if text.model_type == "udop":
            boxes = "float"

    shortest = 1
    if task.predicts_next_token:  # the first token of a sample is never predicted
        shortest = 2
    return RandomTokens(
        task=task.name,
        sequence_length=asked.length(positions(text), shortest),
        vocab_size=vocabulary,
        pad_token_id=padding(text, vocabulary),
        labels=labels,
        # Gemma's models of images want to be told, in training, that no token is of an image.
        zeros=tuple(name for name in _TYPES if name in asked.arguments),
        regions=regions,
        spectrogram=spectrogram,
        sound=sound,
        boxes=boxes,
    )
