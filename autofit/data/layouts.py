"""Which part of each tensor is a sample's, in batches whose samples are not the rows of dim 0.

Known are layouts that processors and collators make: patches or images packed beside `input_ids`, a
dict or tensor of labels for each image, sequences packed into one row, and graphs. Others need a
function that splits them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autofit.core.workload import Rows

Take = Callable[[Sequence[int]], torch.Tensor]  # samples -> what a tensor holds of them
Tensors = Mapping[Any, torch.Tensor]  # the tensors of a batch that have dimensions
_PACKED = (  # patches, the size of each image or video in patches, and the type of its tokens
    ("pixel_values", "image_grid_thw", 1),
    ("pixel_values_videos", "video_grid_thw", 2),
)
_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens stand for images or videos
_TRIED = 8  # kinds of tokens, where no types say which they are
_BOUNDS = "cu_seq"  # cu_seqlens, cu_seq_lens_q, ...: where packed sequences begin and end


@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch are.

    Attributes:
        sizes: how large each sample is.
        takes: by the id of a tensor, how its samples are taken.
        lists: the ids of lists that hold an item for each sample.
    """

    sizes: Sequence[int]
    takes: dict[int, Take] = field(default_factory=dict)
    lists: frozenset[int] = frozenset()


def layout_of(batch: Any) -> Layout | None:
    """The layout of a batch; None where its samples are the rows of dim 0, as far as is known."""
    if isinstance(batch, list | tuple):
        return _of_lists({"": batch}) or _of_lists(dict(enumerate(batch)))
    if not isinstance(batch, Mapping) or isinstance(batch, Rows):
        return None

    tensors = {name: value for name, value in batch.items() if _has_dims(value)}
    for of_kind in (_of_graphs, _of_packed_sequences, _of_images):
        layout = of_kind(tensors)
        if layout is not None:
            return layout

    return _of_lists(batch)


def _of_lists(parts: Mapping[Any, Any]) -> Layout | None:
    """Lists of dicts, or of tensors of different sizes, with one for each sample."""
    lists = {name: part for name, part in parts.items() if type(part) is list and part}
    if not lists:  # as usual, and every micro-batch is asked
        return None

    rows = {part.shape[0] for part in parts.values() if _has_dims(part)}
    dicts = [part for part in lists.values() if _are_alike(part)]
    counts = rows
    if not rows:
        counts = {len(part) for part in dicts or lists.values()}
    if len(counts) != 1:
        return None

    (samples,) = counts
    length = samples if rows else None
    are_certain = bool(dicts) and (bool(rows) or len(lists) > 1)
    sizes = [0] * samples
    own = set()
    for name, part in lists.items():
        items = list(map(_tensors, part))
        if len(part) != samples or not all(items):
            continue

        is_certain = are_certain or str(name).endswith("labels")
        if not is_certain and not _differ_in_size(items, length):
            continue

        own.add(id(part))
        for sample, item in enumerate(items):
            sizes[sample] += sum(tensor.numel() for tensor in item)

    if not own:
        return None
    return Layout(sizes, lists=frozenset(own))


def _has_dims(value: Any) -> bool:
    """Whether it is a tensor with dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _are_alike(items: list[Any]) -> bool:
    """Whether they are dicts with the same keys."""
    return all(isinstance(item, Mapping) and item.keys() == items[0].keys() for item in items)


def _tensors(item: Any) -> list[torch.Tensor]:
    """The tensors of an item of a list: its own, or itself."""
    values = [item]
    if isinstance(item, Mapping):
        values = list(item.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _differ_in_size(items: list[list[torch.Tensor]], samples: int | None) -> bool:
    """Whether tensors are not all as long as there are samples, or as each other where that is not
    known."""
    lengths = set()
    for tensor in itertools.chain(*items):
        lengths.add(tensor.shape[0] if tensor.dim() else None)
    if samples is None:
        return len(lengths) > 1

    return lengths != {samples}


def _of_images(tensors: Tensors) -> Layout | None:
    """Patches, or images, packed beside texts; the tokens of each text say how many are its own."""
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2:
        return None

    samples = len(ids)
    sizes = [0] * samples
    takes: dict[int, Take] = {}
    for name, grid_name, kind in _PACKED:
        pixels = tensors.get(name)
        grid = tensors.get(grid_name)
        if pixels is None or (grid is None and len(pixels) == samples):
            continue

        patches = [1] * len(pixels)
        if grid is not None:
            patches = grid.prod(-1).tolist()
        images = _images_of_samples(patches, tensors, kind)
        if sum(patches) != len(pixels) or images is None:
            return None

        for tensor in tensors.values():
            if tensor is grid or len(tensor) == len(patches) != samples:
                takes[id(tensor)] = _rows(tensor, images)

        starts = _pick(_starts(patches), images)
        takes[id(pixels)] = _rows(pixels, starts)
        for sample, (start, stop) in enumerate(itertools.pairwise(starts)):
            sizes[sample] += stop - start

    # Positions in time, height and width, [3, samples, tokens].
    positions = tensors.get("position_ids")
    if positions is not None and positions.dim() == 3 and positions.shape[1] == samples:
        takes[id(positions)] = _rows(positions, range(samples + 1), dim=1)

    if not takes:
        return None
    return Layout(sizes, takes)


def _images_of_samples(patches: list[int], tensors: Tensors, kind: int) -> list[int] | None:
    """The first image of each sample, and at the end the number of all; None where that is unclear.

    Args:
        patches: of each image.
    """
    samples = len(tensors["input_ids"])
    for tokens in _image_tokens(len(patches), tensors, kind):
        bounds = _divided(patches, tokens)
        if bounds is not None:
            return bounds

    if len(patches) == samples:
        return list(range(samples + 1))
    if samples == 1:
        return [0, len(patches)]

    return None


def _divided(patches: list[int], tokens: list[int]) -> list[int] | None:
    """Images divided so that each sample has its share of patches, by its tokens of all tokens.

    None where images would have to be cut.
    """
    total_patches = sum(patches)
    total_tokens = sum(tokens)
    bounds = [0]
    image = 0
    for count in tokens:
        wanted = count * total_patches
        while wanted > 0 and image < len(patches):
            wanted -= patches[image] * total_tokens
            image += 1

        if wanted:
            return None
        bounds.append(image)

    if image < len(patches):
        return None
    return bounds


def _image_tokens(images: int, tensors: Tensors, kind: int) -> Iterator[list[int]]:
    """How many tokens of each sample may stand for its images.

    Types of tokens say it. Without any, all ids are tried that are frequent enough, the most
    frequent one first.
    """
    for name in _TYPES:
        if name in tensors:
            yield (tensors[name] == kind).sum(-1).tolist()
            return

    ids = tensors["input_ids"]
    tokens, counts = ids.unique(return_counts=True)
    frequent = sorted(zip(counts.tolist(), tokens.tolist(), strict=True), reverse=True)
    for count, token in frequent[:_TRIED]:
        if count >= images:
            yield (ids == token).sum(-1).tolist()


def _of_packed_sequences(tensors: Tensors) -> Layout | None:
    """Sequences one after the other in one row, with their bounds, or positions that start again
    with each."""
    starts = _starts_of_packed(tensors)
    if len(starts) < 3 or starts[0]:
        return None

    total = starts[-1]
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    takes = {}
    for name, tensor in tensors.items():
        if str(name).startswith(_BOUNDS):
            takes[id(tensor)] = _bounds(tensor, sizes)
        elif len(tensor) == total:
            takes[id(tensor)] = _rows(tensor, starts)
        elif len(tensor) == 1 and tensor.dim() > 1 and tensor.shape[1] == total:
            takes[id(tensor)] = _rows(tensor, starts, dim=1)

    return Layout(sizes, takes)


def _starts_of_packed(tensors: Tensors) -> list[int]:
    """Where sequences begin in a row, and where the last one ends; none where nothing says it."""
    for name, tensor in tensors.items():
        if str(name).startswith(_BOUNDS):
            return list(tensor.tolist())

    positions = tensors.get("position_ids")
    if positions is None or positions.dim() != 2 or len(positions) != 1:
        return []
    if "input_ids" not in tensors:
        return []

    first_tokens = (positions[0] == 0).nonzero()[:, 0]
    return [*first_tokens.tolist(), positions.shape[1]]


def positions_in_rows(batch: Any) -> torch.Tensor | None:
    """The positions of tokens, [rows, tokens], in a batch of rows where they alone may say which
    samples are packed into a row; None for any other batch."""
    if not isinstance(batch, Mapping) or isinstance(batch, Rows):
        return None
    if any(str(name).startswith(_BOUNDS) for name in batch):
        return None

    positions = batch.get("position_ids")
    ids = batch.get("input_ids")
    if not isinstance(positions, torch.Tensor) or not isinstance(ids, torch.Tensor):
        return None
    if positions.dim() != 2 or positions.shape != ids.shape[:2]:
        return None

    for value in batch.values():
        if _has_dims(value) and len(value) != len(ids):
            return None

    return positions


def _of_graphs(tensors: Tensors) -> Layout | None:
    """Graphs one after the other: `batch` says of which graph a node is, and edges follow in the
    same order.

    Without it there is one graph.
    """
    edges = tensors.get("edge_index")
    graphs = tensors.get("batch")
    if edges is None:
        return None

    takes: dict[int, Take] = {}
    if graphs is None:
        for tensor in tensors.values():
            takes[id(tensor)] = functools.partial(_whole, tensor)
        return Layout([edges.shape[1]], takes)

    graph_of_edge = graphs[edges[0]]
    if not _is_rising(graph_of_edge) or not _is_rising(graphs):
        return None

    samples = int(graphs.max()) + 1
    node_counts = graphs.bincount(minlength=samples).tolist()
    edge_counts = graph_of_edge.bincount(minlength=samples).tolist()
    node_starts = _starts(node_counts)
    edge_starts = _starts(edge_counts)
    for name, tensor in tensors.items():
        if name == "edge_index":
            take = _rows(tensor, edge_starts, dim=1)
            takes[id(tensor)] = functools.partial(_edges, take, node_counts, edge_counts)
        elif name == "batch":
            takes[id(tensor)] = functools.partial(_owners, tensor, node_counts)
        elif name == "ptr":
            takes[id(tensor)] = _bounds(tensor, node_counts)
        elif str(name).startswith("edge") and len(tensor) == edges.shape[1]:
            takes[id(tensor)] = _rows(tensor, edge_starts)
        elif len(tensor) == len(graphs):
            takes[id(tensor)] = _rows(tensor, node_starts)

    return Layout(node_counts, takes)


def _is_rising(numbers: torch.Tensor) -> bool:
    """Whether no number is smaller than the one before it."""
    return not bool((numbers.diff() < 0).any())


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where parts of these lengths begin that follow each other, and where the last one ends."""
    return [0, *itertools.accumulate(lengths)]


def _pick(values: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The values at these places."""
    return [values[place] for place in chosen]


def _rows(tensor: torch.Tensor, starts: Sequence[int], dim: int = 0) -> Take:
    """Sample i has what lies from start i to the next along a dimension.

    Samples that follow each other are a view.
    """

    def between(first: int, last: int) -> torch.Tensor:
        start = starts[first]
        length = starts[last + 1] - start
        return tensor.narrow(dim, start, length)

    def take(samples: Sequence[int]) -> torch.Tensor:
        first = samples[0]
        last = samples[-1]
        in_a_row = range(first, last + 1)
        if list(samples) == list(in_a_row):
            return between(first, last)

        parts = [between(sample, sample) for sample in samples]
        return torch.cat(parts, dim)

    return take


def _bounds(tensor: torch.Tensor, lengths: Sequence[int]) -> Take:
    """The bounds of samples of these lengths among the chosen ones."""
    return lambda samples: tensor.new_tensor(_starts(_pick(lengths, samples)))


def _whole(tensor: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
    """All of a tensor, where there is one sample."""
    return tensor


def _edges(
    take: Take,
    node_counts: Sequence[int],
    edge_counts: Sequence[int],
    samples: Sequence[int],
) -> torch.Tensor:
    """The edges of samples, [2, edges], between nodes as they are numbered among these samples."""
    edges = take(samples)
    old_starts = _pick(_starts(node_counts), samples)
    new_starts = _starts(_pick(node_counts, samples))[:-1]
    moves = edges.new_tensor(new_starts) - edges.new_tensor(old_starts)

    counts = edges.new_tensor(_pick(edge_counts, samples))
    return edges + moves.repeat_interleave(counts)


def _owners(
    tensor: torch.Tensor,
    node_counts: Sequence[int],
    samples: Sequence[int],
) -> torch.Tensor:
    """The number of each node's graph among these samples."""
    owners: list[int] = []
    for number, sample in enumerate(samples):
        owners += [number] * node_counts[sample]

    return tensor.new_tensor(owners)
