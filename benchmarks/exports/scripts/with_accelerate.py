"""The script that `accelerate launch` is given: all that its config knows nothing of."""

import torch
from accelerate import Accelerator
from samples import GIVEN, loader, model

accelerator = Accelerator(gradient_accumulation_steps=GIVEN["gradient_accumulation_steps"])
own = model()
optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
own, optimizer, batches = accelerator.prepare(own, optimizer, loader())
for _ in range(GIVEN["steps"]):
    for batch in batches:
        with accelerator.accumulate(own):
            accelerator.backward(own(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
