"""Several GPUs train one model: each holds a part of the weights and sees a part of every batch, and the losses are
those of one GPU. Without GPUs, two processes on the CPU do the same.

    python several_gpus.py                              starts a process for each GPU
    torchrun --nproc-per-node 2 several_gpus.py         takes its place among those that torchrun (or srun) started
"""

from pathlib import Path

import torch
from classifier import Classifier, loss, make_data
from torch.utils.data import DataLoader

import autofit

CONFIG = {
    "data_parallel": "fsdp",  # FSDP2: weights, gradients and optimizer state are divided; "ddp" repeats them instead
    "reshard_after_forward": False,  # True frees gathered weights before the backward, and gathers them again
    "micro_batch_size": 64,  # of each GPU: 2 GPUs x 64 samples x 2 micro-batches are a batch of 256
}


def main(steps: int = 60, output: Path = Path("several-gpus")) -> autofit.Trained:
    """Train on all GPUs, then go on with one: a checkpoint belongs to no number of GPUs."""
    torch.manual_seed(0)
    model = Classifier()
    # the batch of all GPUs together
    loader = DataLoader(make_data(8192), batch_size=256, shuffle=True)
    with_cuda = torch.cuda.is_available()
    devices = torch.cuda.device_count() if with_cuda else 2
    options = {
        "loss": loss,
        "lr": 1e-3,
        "device": "cuda" if with_cuda else "cpu",
        "output_dir": output,
    }
    trained = autofit.fit(
        model, loader, config=CONFIG, devices=devices, steps=steps // 2, **options
    )
    print(
        f"on {devices} devices: loss {trained.history[0].loss:.3f} -> {trained.history[-1].loss:.3f}"
    )
    if not torch.distributed.is_torchelastic_launched():
        trained = autofit.fit(
            model, loader, config=CONFIG, devices=1, steps=steps, resume=True, **options
        )
        print(f"on one, from the checkpoint: loss -> {trained.history[-1].loss:.3f}")
    return trained


if __name__ == "__main__":
    main()
