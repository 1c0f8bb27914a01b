"""TRL's loss without Triton: the model's own loss and gradients, in TRL's bytes."""

import functools

import pytest
import torch

from autofit.core.config import Config
from autofit.hardware.tracker import StorageTracker
from autofit.models import with_loss_of
from autofit.models.losses import in_tiles
from autofit.models.losses.in_tiles import InTiles
from autofit.techniques import all_techniques, refuse
from tests import tiny


def batch_of(rows: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * 12).reshape(rows, 12) % 64
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 4096])
def test_it_is_the_models_own_loss(
    kind: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_tiles, "ROWS", size)
    monkeypatch.setattr(in_tiles, "COLUMNS", 7 if size == 5 else 32768)
    torch.manual_seed(0)
    model = tiny.llama()().to(kind)
    batch = batch_of()
    gradients = []
    losses = []
    for compute in (lambda: model(**batch).loss, functools.partial(InTiles(), model, batch)):
        model.zero_grad()
        loss = compute()
        loss.backward()
        losses.append(loss.item())
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    close = 1e-5 if kind is torch.float32 else 2e-2
    assert losses[0] == pytest.approx(losses[1], rel=close)
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=close, atol=close)


@pytest.mark.parametrize("scale", [{}, {"logits_scaling": 2.0}])
@pytest.mark.filterwarnings("ignore")  # of TRL's import
def test_it_holds_what_trl_holds(scale: dict[str, float]) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    peaks = []
    losses = []
    for is_trl in (True, False):
        torch.manual_seed(0)
        model = tiny.llama()()
        vars(model.config).update(scale)
        batch = batch_of(8)
        if is_trl:
            utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        tracker = StorageTracker()
        with tracker:
            tracker.see(list(model.parameters()))
            if is_trl:
                output = model(**batch, use_cache=False, fused_lm_head=True)
                loss = -output.log_probs.sum() / output.label_mask.sum()
            else:
                loss = InTiles()(model, batch)
            loss.backward()
        peaks.append(tracker.peak)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.005)


def test_a_workload_with_it_has_no_other_loss() -> None:
    workload = with_loss_of(tiny.llama_workload(), "trl")
    assert workload.summary()["own_loss"] == "trl"
    assert workload.count is not None and workload.count(batch_of()) == 29
    assert with_loss_of(workload, None) is workload
    off = {technique.name: technique.off for technique in all_techniques()}
    reason = refuse(Config({**off, "loss": "chunked"}), workload, tiny.CPU)
    assert reason is not None and reason.startswith("loss:")
