"""What code reads of values that are known, and the shapes that follow from them, are those of real steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from autofit.core.errors import UntraceableError
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.techniques import canonicalize
from tests.estimate.traced import AMPERE, peak, traced, tracked
from tests.estimate.vision_language import VISION_LANGUAGE, vision_language
from tests.tiny import CPU


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_models_of_images_and_texts_are_predicted_to_the_byte(name: str) -> None:
    workload = vision_language(name)
    assert peak(traced(workload)) == tracked(workload, {})


def _detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    sizes = {
        f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _SIZES.items()
    }
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        d_model=32,
        num_queries=10,
        num_labels=5,
        **sizes,
    )
    return transformers.DetrForObjectDetection(config)


_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}


def _images_with_boxes(samples: int) -> dict[str, Any]:
    boxes = {"class_labels": torch.tensor([1, 2, 3]), "boxes": torch.full((3, 4), 0.4)}
    pixels, mask = torch.randn(samples, 3, 32, 32), torch.ones(samples, 32, 32, dtype=torch.long)
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": [boxes] * samples}


def test_detection_is_predicted_whatever_query_finds_an_object() -> None:
    workload = Workload(_detr, _images_with_boxes, effective_batch_size=2)
    assert peak(traced(workload)) == tracked(workload, {})


@pytest.mark.parametrize("name", ["qwen2.5-vl", "smolvlm"])
def test_every_micro_batch_of_them_is_predicted_from_one_trace(name: str) -> None:
    """Qwen's code works on each window of each image by itself: on as many as there are samples."""
    workload = vision_language(name, effective_batch_size=4)
    knobs: list[dict[str, Any]] = [{"micro_batch_size": 1}, {"activation_checkpointing": "full"}]
    nbytes, _ = predict_all(
        workload, CPU, [canonicalize(each, workload, CPU) for each in knobs], measuring=0
    )
    assert nbytes == pytest.approx([tracked(workload, each) for each in knobs], rel=0.005)


class Computes(nn.Module):
    """A layer, and a function of its output and the batch's other tensor."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), mask).mean()


def _float_mask(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = (1.0 - mask.float()) * -1e9  # more floats than are computed at once
    return out[mask] if (bias == 0).any().item() else out


def _overwritten(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counts = mask.long()
    view = counts[:1]
    view += 1
    return out.repeat_interleave(counts[:, 0], 0)


def _filled(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    sizes = torch.empty((2, 1), dtype=torch.long)
    for number in range(2):
        sizes[number, 0] = 2 * number + 1
    return out.split([*sizes[:, 0].tolist(), 2], 1)[1]


def _float_overwritten(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros(mask.shape).repeat(1, 2)  # more floats than are computed at once
    chosen[:, 6:] = 1
    return out[chosen.nonzero()[:, 0]]


def _ctc(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    classes = torch.ones_like(mask, dtype=torch.long)
    lengths = mask.sum(1)
    return functional.ctc_loss(out.log_softmax(-1).transpose(0, 1), classes, lengths + 2, lengths)


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked": lambda out, mask: out[mask],
    "selected": lambda out, mask: out.masked_select(mask.unsqueeze(-1)),
    "assigned": lambda out, mask: out.index_put((mask,), out.new_zeros(())),
    "nonzero": lambda out, mask: out[mask.nonzero()[:, 0]],
    "repeated": lambda out, mask: out.repeat_interleave(mask.sum(1), 0),
    "unique": lambda out, mask: out * len(mask.long().unique()),
    "split": lambda out, mask: out.split(mask.sum(1).tolist(), 1)[0],
    "listed": lambda out, mask: out * torch.tensor([mask[0, 0], mask[0, 1]]).sum(),
    "named": lambda out, mask: {"3": out.exp()}[f"{mask[0].sum()}"],
    "floats": _float_mask,
    "ctc": _ctc,
    "overwritten": _overwritten,
    "filled": _filled,
    "floats overwritten": _float_overwritten,
    "finite": lambda out, mask: out * 2 if out.isfinite().all() and not out.isnan().any() else out,
    "equal": lambda out, mask: (
        out if out.equal(out * 2) or not out.view(-1, 8).equal(out.view(-1, 8)) else out.exp() * 2
    ),
    "drawn": lambda out, mask: out if torch.rand([]) < 0.0 else out * 2,
}


def _workload(function: Any) -> Workload:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(samples, 6, 8), "mask": torch.arange(6).expand(samples, 6) < 3}

    return Workload(lambda: Computes(function), batch, effective_batch_size=2)


@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_inputs_has_real_shapes(name: str) -> None:
    workload = _workload(READS[name])
    assert peak(traced(workload)) == tracked(workload, {})


@compile_compatible_method_lru_cache(maxsize=2)
def _positions(length: int) -> torch.Tensor:
    return torch.arange(length).float()


def test_what_a_library_caches_for_the_process_is_not_fake() -> None:
    workload = _workload(lambda out, mask: out * _positions(8))
    traced(workload)
    assert _positions(8).tolist() == list(range(8))


def _unknown(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counts = mask.float()[:, :1]
    counts += out.detach()[:, 0, :1]  # from now on they depend on the weights
    return out * counts.sum().item()


def test_what_depends_on_weights_stays_unknown() -> None:
    with pytest.raises(UntraceableError, match="reads a number that depends on its weights"):
        traced(_workload(_unknown))
    with pytest.raises(UntraceableError, match="unique"):
        traced(_workload(lambda out, mask: out * len(out.unique())))


def _routed(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As people write mixtures of experts: each of eight gets the rows that chose it."""
    flat = out.flatten(0, 1)
    weights, chosen = flat.topk(2)
    mixed = torch.zeros_like(flat)
    for number in range(8):
        rows, place = torch.where(chosen == number)
        mixed = mixed.index_add(0, rows, flat[rows].exp() * weights[rows, place, None])
    return mixed


def _sized(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows sorted by the expert that they chose, and cut by how many chose each."""
    flat = out.flatten(0, 1)
    chosen = flat.argmax(-1)
    counts = functional.one_hot(chosen, 8).sum(0).tolist()
    return torch.cat([rows.exp() for rows in flat[chosen.argsort()].split(counts)])


@pytest.mark.parametrize("function", [_routed, _sized])
def test_what_scores_choose_is_taken_to_be_spread_evenly(function: Any) -> None:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(samples, 16, 8), "mask": torch.ones(samples, 1)}

    workload = Workload(lambda: Computes(function), batch, effective_batch_size=4)
    prediction = traced(workload)
    assert prediction.assumptions == (
        "what the model's own scores choose, as the experts of a token, was taken to be spread evenly.",
    )
    assert peak(prediction) == pytest.approx(tracked(workload, {}), rel=0.1)
    configs = [canonicalize({"micro_batch_size": size}, workload, CPU) for size in (1, 2)]
    nbytes, _ = predict_all(workload, CPU, configs, measuring=0)
    assert nbytes == pytest.approx(
        [peak(traced(workload, micro_batch_size=size)) for size in (1, 2)], rel=0.02
    )


def test_all_rows_are_taken_to_be_chosen_where_values_choose_them() -> None:
    workload = _workload(lambda out, mask: out[out > 0])
    prediction = traced(workload)
    assert prediction.assumptions == (
        "where values choose rows, all were taken to be chosen, the most there can be.",
    )
    assert peak(prediction) >= tracked(workload, {})


def _packed(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(2**42, dtype=torch.uint8)  # such as that of the weights of a large block
    small = memory.view(torch.float32).as_strided((4,), (1,), 8)
    small.copy_(out[0, :1, 0].expand(4))
    return out * small.sum()


def test_of_large_memory_that_weights_are_packed_into_nothing_is_computed() -> None:
    found = traced(_workload(_packed), AMPERE)
    assert max(event.nbytes for event in found.events) == 2**42


class Drops(nn.Module):
    """Layers of which each is left out at random."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers, self.probability = (
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            probability,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not torch.rand([]) < self.probability:
                x = layer(x).relu()
        return x.mean()


def test_no_layer_is_dropped_in_a_prediction_and_no_random_number_is_taken() -> None:
    batch = torch.ones(64, 8)
    state = torch.get_rng_state()
    workload = Workload(lambda: Drops(0.9), lambda n: batch[:n], effective_batch_size=64)
    assert peak(traced(workload)) == peak(traced(replace(workload, model=lambda: Drops(0.0))))
    assert torch.equal(torch.get_rng_state(), state)


class PassesMessages(nn.Module):
    """Nodes hear from their neighbours, and a graph is the sum of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        h = self.enter(x)
        h = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]).relu()
        graphs = torch.zeros(int(batch.max()) + 1, 32).index_add(0, batch, h)
        return functional.cross_entropy(self.head(graphs), y)


def _graphs(samples: int) -> dict[str, torch.Tensor]:
    ring = torch.stack([torch.arange(20), (torch.arange(20) + 1) % 20])
    edges = torch.cat([ring + 20 * graph for graph in range(samples)], 1)
    owners, classes = (
        torch.arange(samples).repeat_interleave(20),
        torch.zeros(samples, dtype=torch.long),
    )
    return {"x": torch.ones(20 * samples, 16), "edge_index": edges, "batch": owners, "y": classes}


def test_micro_batches_of_graphs_are_predicted_with_their_renumbered_edges() -> None:
    workload = Workload(PassesMessages, _graphs, effective_batch_size=4)
    for size in (1, 4):
        knobs = {"micro_batch_size": size}
        assert peak(traced(workload, **knobs)) == pytest.approx(tracked(workload, knobs), rel=0.001)
