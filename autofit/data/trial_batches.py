"""Batches that a loss is tried on: samples that differ, and variations of them that tell counts
apart.

Samples of one length with all their labels do not tell whether a loss is a mean over samples or
over labels. So some labels and the ends of some rows are left out, as padding would, differently in
each sample and each tensor.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autofit.data.batch import IGNORED_LABEL, map_tensors, take_samples
from autofit.data.counts import is_mask, paths
from autofit.data.layouts import layout_of

TRIAL_SAMPLES = 4  # that a loss is tried on; each more takes time, and hardly tells more
_LABELS = ("label", "target", "tags", "answer")  # in the names of tensors that hold labels
# In the names of tensors with numbers that other tensors depend on.
_POSITIONS = ("position", "length", "seq", "index", "type", "size")
_LENGTH = 16  # tokens that rows are cut to
_LOOKED_AT = 256  # samples among which those that differ most are found
_Path = tuple[Any, ...]


def altered(batch: Any, *, ignores_labels: bool = True) -> Any:
    """The batch with labels left out, rows ended early and holes in masks, of each sample and
    tensor another share; and with some labels that two samples have in common.

    Args:
        ignores_labels: the loss takes ignored labels.
    """
    if layout_of(batch) is not None:
        return batch

    numbers = []
    for path, tensor in paths(batch):
        if not tensor.is_floating_point() or is_mask(tensor):
            numbers.append((path, tensor))

    labels = _labels_among(numbers)
    changed: dict[int, torch.Tensor] = {}
    for path, tensor in numbers:
        if _has_word(_name_of(path).lower(), _POSITIONS):
            continue
        if id(tensor) in labels:
            changed[id(tensor)] = _other_labels(tensor, ignores=ignores_labels)
        elif tensor.dim() in (2, 3) and tensor.shape[1] >= 4:
            changed[id(tensor)] = _ended_early(tensor)
            if is_mask(tensor):
                changed[id(tensor)] = _with_holes(tensor)

    return _with_changed(batch, changed)


def ignores(batch: Any) -> bool:
    """Whether any label of a batch is one that losses leave out."""
    numbers = [tensor for _, tensor in paths(batch) if not tensor.is_floating_point()]
    return any(bool((tensor == IGNORED_LABEL).any()) for tensor in numbers)


def shortened(batch: Any) -> Any:
    """The batch with rows of tokens cut to a few, where each sample still has a label then."""
    if layout_of(batch) is not None:
        return batch

    rows = [tensor for _, tensor in paths(batch) if tensor.dim() >= 2]
    lengths = {tensor.shape[1] for tensor in rows}
    if len(lengths) != 1 or min(lengths) <= _LENGTH:
        return batch

    for tensor in rows:
        if tensor.is_floating_point():
            return batch
        has_label = (tensor[:, 1:_LENGTH] != IGNORED_LABEL).any(dim=1)
        if not bool(has_label.all()):
            return batch

    changed = {id(tensor): tensor[:, :_LENGTH] for tensor in rows}
    return _with_changed(batch, changed)


def diversified(batch: Any, model: nn.Module) -> Any:
    """The batch with noise on its numbers and other token ids: for one whose samples are all
    alike."""
    generator = torch.Generator().manual_seed(0)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = [embedding.num_embeddings for embedding in embeddings]

    changed: dict[int, torch.Tensor] = {}
    for path, tensor in paths(batch):
        if tensor.is_floating_point() and tensor.dim():
            changed[id(tensor)] = _with_noise(tensor, generator)
            continue

        is_row = tensor.dim() >= 2 and not _has_word(_name_of(path), _POSITIONS)
        if not vocabularies or not is_row:
            continue

        is_constant = bool((tensor == tensor.flatten()[0]).all())
        if is_constant:
            vocabulary = max(2, min(vocabularies))
            ids = torch.randint(1, vocabulary, tensor.shape, generator=generator)
            changed[id(tensor)] = ids.to(tensor)

    return _with_changed(batch, changed)


def _with_noise(numbers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that differ from these by about half of what they differ by among each other."""
    spread = 0.0
    if numbers.numel() > 1:
        spread = float(numbers.float().std())

    noise = torch.randn(numbers.shape, generator=generator)
    return numbers + noise.to(numbers) * (0.5 * spread + 0.1)


def _with_changed(batch: Any, changed: Mapping[int, torch.Tensor]) -> Any:
    """The batch with other tensors in place of those with these ids."""
    return map_tensors(batch, lambda tensor: changed.get(id(tensor), tensor))


def _name_of(path: _Path) -> str:
    """The keys that lead to a tensor."""
    return " ".join(map(str, path))


def _has_word(name: str, words: Iterable[str]) -> bool:
    """Whether a name has any of these words in it."""
    return any(word in name for word in words)


def most_different(batch: Any, samples: int) -> Any:
    """So many samples of a batch, as different in length, labels and content as it has them."""
    scores = _scores(batch)
    if scores is None:
        return take_samples(batch, range(samples))
    if len(scores) <= samples:
        return take_samples(batch, range(len(scores)))

    order = scores.argsort()
    places = torch.linspace(0, len(order) - 1, samples).round().long()
    return take_samples(batch, order[places].tolist())


def variety(batch: Any) -> float:
    """How much the samples of a batch differ in what a loss may count: 0 where not at all."""
    scores = _scores(batch)
    if scores is None or len(scores) < 2:
        return 0.0

    spread = scores.max() - scores.min()
    return float(spread)


def _scores(batch: Any) -> torch.Tensor | None:
    """A number for each of the first samples, [samples]; None where no tensor gives one.

    It is the size of the sample where that is known; else how many of its labels and mask count,
    and a little its content.
    """
    layout = layout_of(batch)
    if layout:
        return torch.tensor(layout.sizes, dtype=torch.float64)[:_LOOKED_AT]

    scores: torch.Tensor | None = None
    for _, tensor in paths(batch):
        is_content = tensor.is_floating_point() and tensor.dim() > 2
        if not tensor.dim() or is_content:
            continue

        rows = tensor.detach()[:_LOOKED_AT]
        if rows.dim() == 1:
            rows = rows.unsqueeze(1)
        rows = rows.flatten(1)

        filled = (rows != 0).double().mean(1)
        counting = (rows != IGNORED_LABEL).double().mean(1)
        content = rows.double().mean(1)
        score = filled + counting + 1e-3 * torch.tanh(content - content.mean())
        if scores is not None and len(scores) == len(score):
            score = scores + score
        scores = score

    return scores


def _labels_among(tensors: list[tuple[_Path, torch.Tensor]]) -> set[int]:
    """The ids of tensors that hold labels: by their names, or because some labels are ignored.

    Where there are none, it is the last tensor, unless that may be all that a model gets.
    """
    numbers = [(path, tensor) for path, tensor in tensors if not is_mask(tensor)]
    labels = set()
    for path, tensor in numbers:
        is_named = _has_word(_name_of(path).lower(), _LABELS)
        if is_named or bool((tensor == IGNORED_LABEL).any()):
            labels.add(id(tensor))

    if not labels and numbers:
        _, last = numbers[-1]
        if len(numbers) > 1 or last.dim() == 1:
            labels.add(id(last))

    return labels


def _other_labels(labels: torch.Tensor, *, ignores: bool) -> torch.Tensor:
    """Labels of which two samples share some, and of which each sample lacks others.

    Args:
        ignores: labels may be left out: the first sample lacks its first one, and the next samples
            more and more of their last ones.
    """
    changed = labels.clone()
    is_per_token = labels.dim() >= 2 and labels.shape[1] > 2
    if len(labels) > 3 and is_per_token:
        half = labels.shape[1] // 2
        changed[1, :half] = changed[2, :half]
    elif len(labels) > 3:
        changed[1] = changed[3]

    if not ignores:
        return changed
    if not is_per_token:
        changed[0] = IGNORED_LABEL
        return changed

    changed[0, 0] = IGNORED_LABEL
    length = labels.shape[1]
    for sample in range(1, len(labels)):
        missing = max(1, sample * length // (2 * sample + 3))
        changed[sample, length - missing :] = IGNORED_LABEL

    return changed


def _with_holes(mask: torch.Tensor) -> torch.Tensor:
    """A mask that also leaves out the second entry of the first sample, the next two of the second,
    and so on."""
    changed = mask.clone()
    for sample in range(min(len(mask), mask.shape[1] - 2)):
        changed[sample, 1 : 2 + sample] = 0

    return changed


def _ended_early(rows: torch.Tensor) -> torch.Tensor:
    """Rows that end in padding, each after another length.

    Padding is the last value of most rows, where some row has it twice at its end; else 0.
    """
    changed = rows.clone()
    length = rows.shape[1]
    padding: torch.Tensor | int = 0
    last = rows[:, -1].flatten().mode().values
    ends_twice = (rows[:, -2:] == last).all(dim=1)
    if bool(ends_twice.any()):
        padding = last

    for sample in range(len(rows) - 1):
        missing = max(1, (sample + 1) * length // (4 + 2 * sample))
        changed[sample, length - missing :] = padding

    return changed
