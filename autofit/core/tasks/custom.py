"""custom: whatever a model, a loss and data of the user's own are for."""

from autofit.core.task import Task

CUSTOM = Task(name="custom", medium="own", labels="own", defers_logits=True)
