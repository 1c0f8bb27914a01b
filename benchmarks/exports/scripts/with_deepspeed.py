"""The script that DeepSpeed's config is given to: it makes the model and calls the engine."""

import deepspeed
import torch.distributed as dist
from samples import GIVEN, loader, model
from torch.utils.data import DistributedSampler

deepspeed.init_distributed("gloo")
own = model()
engine, *_ = deepspeed.initialize(
    model=own, model_parameters=own.parameters(), config="deepspeed.json"
)
batches = loader()
batches = loader(sampler=DistributedSampler(batches.dataset, shuffle=False))
for _ in range(GIVEN["steps"]):
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        del loss
dist.destroy_process_group()
