"""data_parallel_shard: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "data_parallel_shard",
    numbers=(1, 1_048_577),
    takes="a whole number, or null for what the replicas leave",
    title="Shards",
    short="{value} shards",
    of_devices=True,
    divides=True,
    degree="shard",
    derived=True,
    follows=True,
)
