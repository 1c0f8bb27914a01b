"""Which part of each tensor is a sample's, in batches whose samples are not the rows of dim 0.

Known are layouts that processors and collators make: patches or images packed beside `input_ids`, a dict or tensor of
labels for each image, sequences packed into one row, and graphs. Others need a function that splits them.
"""

import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autofit.core.workload import Rows

Take = Callable[[Sequence[int]], torch.Tensor]  # samples -> what a tensor holds of them
_PACKED = ("pixel_values", "image_grid_thw", 1), ("pixel_values_videos", "video_grid_thw", 2)
# say which tokens stand for images (1) and videos (2)
_TYPES = ("mm_token_type_ids", "token_type_ids")
_TRIED = 8  # kinds of tokens, where no types say which they are
_BOUNDS = "cu_seq"  # cu_seqlens, cu_seq_lens_q, ...: where packed sequences begin and end


@dataclass(frozen=True)
class Layout:
    """How many samples there are, and how large each is; by id: how a tensor's samples are taken, and the lists that
    hold something for each sample."""

    sizes: Sequence[int]
    takes: dict[int, Take] = field(default_factory=dict)
    lists: frozenset[int] = frozenset()


def layout_of(batch: Any) -> Layout | None:
    """The layout of a batch; None where its samples are the rows of dim 0, as far as is known."""
    if isinstance(batch, list | tuple):
        return _of_lists({"": batch}) or _of_lists(dict(enumerate(batch)))
    if not isinstance(batch, Mapping | UserDict):
        return None
    tensors = {
        key: each for key, each in batch.items() if isinstance(each, torch.Tensor) and each.dim()
    }
    if isinstance(batch, Rows):
        return None
    for layout in (_of_graphs, _of_packed_sequences, _of_images):
        if found := layout(tensors):
            return found
    return _of_lists(dict(batch))


def _of_lists(parts: Mapping[Any, Any]) -> Layout | None:
    """Lists of dicts, or of tensors of different sizes, with one for each sample."""
    lists = {name: part for name, part in parts.items() if type(part) is list and part}
    if not lists:  # as usual, and every micro-batch is asked
        return None
    dicts = [name for name, part in lists.items() if _are_alike(part)]
    rows = {
        part.shape[0] for part in parts.values() if isinstance(part, torch.Tensor) and part.dim()
    }
    counts = rows or {len(lists[name]) for name in dicts or lists}
    if len(counts) != 1:
        return None
    (samples,), certain = counts, bool(dicts) and (bool(rows) or len(lists) > 1)
    sizes, own = [0] * samples, set()
    for name, part in lists.items():
        items = [_tensors(item) for item in part]
        heights = {tensor.shape[0] if tensor.dim() else None for item in items for tensor in item}
        certain_here = certain or str(name).endswith("labels")
        if (
            len(part) == samples
            and all(items)
            and (certain_here or (heights != rows if rows else len(heights) > 1))
        ):
            own.add(id(part))
            sizes = [
                size + sum(each.numel() for each in item)
                for size, item in zip(sizes, items, strict=True)
            ]
    return Layout(sizes, lists=frozenset(own)) if own else None


def _are_alike(items: list[Any]) -> bool:
    """Whether they are dicts with the same keys."""
    return all(
        isinstance(item, Mapping | UserDict) and item.keys() == items[0].keys() for item in items
    )


def _tensors(item: Any) -> list[torch.Tensor]:
    values = item.values() if isinstance(item, Mapping | UserDict) else [item]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _of_images(tensors: Mapping[Any, torch.Tensor]) -> Layout | None:
    """Patches, or images, packed beside texts; their tokens say whose they are."""
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2:
        return None
    samples, sizes = len(ids), [0] * len(ids)
    takes: dict[int, Take] = {}
    for name, grid_name, kind in _PACKED:
        pixels, grid = tensors.get(name), tensors.get(grid_name)
        if pixels is None or (grid is None and len(pixels) == samples):
            continue
        patches = [1] * len(pixels) if grid is None else grid.prod(-1).tolist()
        images = _images_of_samples(patches, tensors, kind) if sum(patches) == len(pixels) else None
        if images is None:
            return None
        of_images = [each for each in tensors.values() if len(each) == len(patches) != samples]
        takes |= {
            id(each): _rows(each, images)
            for each in (*of_images, *([] if grid is None else [grid]))
        }
        starts = [sum(patches[:image]) for image in images]
        takes[id(pixels)] = _rows(pixels, starts)
        sizes = [
            size + after - start
            for size, (start, after) in zip(sizes, itertools.pairwise(starts), strict=True)
        ]
    positions = tensors.get("position_ids")
    # of time, height and width
    if positions is not None and positions.dim() == 3 and positions.shape[1] == samples:
        takes[id(positions)] = _rows(positions, range(samples + 1), dim=1)
    return Layout(sizes, takes) if takes else None


def _images_of_samples(
    patches: list[int], tensors: Mapping[Any, torch.Tensor], kind: int
) -> list[int] | None:
    """The first image of each sample, and their number; None where that is unclear."""
    samples = len(tensors["input_ids"])
    for tokens in _image_tokens(len(patches), tensors, kind):
        total, bounds = sum(tokens), [0]
        for count in tokens:  # each has its share of the patches
            wanted, image = count * sum(patches), bounds[-1]
            while wanted > 0 and image < len(patches):
                wanted -= patches[image] * total
                image += 1
            if wanted:
                break
            bounds.append(image)
        if len(bounds) == samples + 1 and bounds[-1] == len(patches):
            return bounds
    return (
        list(range(samples + 1))
        if len(patches) == samples
        else [0, len(patches)]
        if samples == 1
        else None
    )


def _image_tokens(
    images: int, tensors: Mapping[Any, torch.Tensor], kind: int
) -> Iterator[list[int]]:
    """How many tokens of each sample may stand for its images: by the types of tokens, or of those that are frequent
    enough, the most frequent first."""
    for name in _TYPES:
        if name in tensors:
            yield (tensors[name] == kind).sum(-1).tolist()
            return
    ids = tensors["input_ids"]
    tokens, counts = ids.unique(return_counts=True)
    frequent = sorted(zip(counts.tolist(), tokens.tolist(), strict=True), reverse=True)
    yield from (
        (ids == token).sum(-1).tolist() for count, token in frequent[:_TRIED] if count >= images
    )


def _of_packed_sequences(tensors: Mapping[Any, torch.Tensor]) -> Layout | None:
    """Sequences behind each other in one row, with their bounds, or positions that start again with each."""
    bounds = {name: each for name, each in tensors.items() if str(name).startswith(_BOUNDS)}
    positions, ids = tensors.get("position_ids"), tensors.get("input_ids")
    if bounds:
        starts = next(iter(bounds.values())).tolist()
    elif positions is not None and positions.dim() == 2 and len(positions) == 1 and ids is not None:
        starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), positions.shape[1]]
    else:
        return None
    if len(starts) < 3 or starts[0]:
        return None
    sizes = [after - start for start, after in itertools.pairwise(starts)]
    takes = {}
    for name, each in tensors.items():
        if name in bounds:
            takes[id(each)] = _bounds(each, sizes)
        elif len(each) == starts[-1]:
            takes[id(each)] = _rows(each, starts)
        elif len(each) == 1 and each.dim() > 1 and each.shape[1] == starts[-1]:
            takes[id(each)] = _rows(each, starts, dim=1)
    return Layout(sizes, takes)


def positions_in_rows(batch: Any) -> torch.Tensor | None:
    """The positions [rows, tokens] of the tokens of a batch of rows, where they alone may say which samples are packed
    into a row; None of any other batch."""
    if not isinstance(batch, Mapping | UserDict) or isinstance(batch, Rows):
        return None
    if any(str(name).startswith(_BOUNDS) for name in batch):
        return None
    positions, ids = batch.get("position_ids"), batch.get("input_ids")
    if not isinstance(positions, torch.Tensor) or not isinstance(ids, torch.Tensor):
        return None
    if positions.dim() != 2 or positions.shape != ids.shape[:2]:
        return None
    others = [each for each in batch.values() if isinstance(each, torch.Tensor) and each.dim()]
    return positions if all(len(each) == len(ids) for each in others) else None


def _of_graphs(tensors: Mapping[Any, torch.Tensor]) -> Layout | None:
    """Graphs behind each other: `batch` says whose a node is, and edges follow in the same order. Without it there is
    one graph."""
    edges, graphs = tensors.get("edge_index"), tensors.get("batch")
    if edges is None:
        return None
    if graphs is None:
        return Layout(
            [edges.shape[1]],
            {id(each): functools.partial(_whole, each) for each in tensors.values()},
        )
    samples, of_edges = int(graphs.max()) + 1, graphs[edges[0]]
    if bool((of_edges.diff() < 0).any()) or bool((graphs.diff() < 0).any()):
        return None
    nodes, ends = (
        graphs.bincount(minlength=samples).tolist(),
        of_edges.bincount(minlength=samples).tolist(),
    )
    node_starts, edge_starts = ([0, *itertools.accumulate(each)] for each in (nodes, ends))
    takes: dict[int, Take] = {}
    for name, each in tensors.items():
        if name == "edge_index":
            takes[id(each)] = functools.partial(
                _edges, _rows(each, edge_starts, dim=1), nodes, node_starts, ends
            )
        elif name == "batch":
            takes[id(each)] = functools.partial(_owners, each, nodes)
        elif name == "ptr":
            takes[id(each)] = _bounds(each, nodes)
        elif str(name).startswith("edge") and len(each) == edges.shape[1]:
            takes[id(each)] = _rows(each, edge_starts)
        elif len(each) == len(graphs):
            takes[id(each)] = _rows(each, node_starts)
    return Layout(nodes, takes)


def _rows(tensor: torch.Tensor, starts: Sequence[int], dim: int = 0) -> Take:
    """Sample i has what lies from start i to the next along a dimension; samples that follow each other are a view."""

    def of(first: int, last: int) -> torch.Tensor:
        return tensor.narrow(dim, starts[first], starts[last + 1] - starts[first])

    def take(samples: Sequence[int]) -> torch.Tensor:
        first, last = samples[0], samples[-1]
        if list(samples) == list(range(first, last + 1)):
            return of(first, last)
        return torch.cat([of(sample, sample) for sample in samples], dim)

    return take


def _bounds(tensor: torch.Tensor, lengths: Sequence[int]) -> Take:
    return lambda samples: tensor.new_tensor(
        [0, *itertools.accumulate(lengths[sample] for sample in samples)]
    )


def _whole(tensor: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
    return tensor


def _edges(
    take: Take,
    nodes: Sequence[int],
    starts: Sequence[int],
    edges: Sequence[int],
    samples: Sequence[int],
) -> torch.Tensor:
    """Edges between the nodes as they are numbered among these samples."""
    taken = take(samples)
    after = itertools.accumulate((nodes[sample] for sample in samples), initial=0)
    moves = [new - starts[sample] for new, sample in zip(after, samples, strict=False)]
    return taken + taken.new_tensor(moves).repeat_interleave(
        taken.new_tensor([edges[sample] for sample in samples])
    )


def _owners(tensor: torch.Tensor, nodes: Sequence[int], samples: Sequence[int]) -> torch.Tensor:
    return tensor.new_tensor(
        [number for number, sample in enumerate(samples) for _ in range(nodes[sample])]
    )
