"""fsdp_offload: its values, how they read, and what depends on them."""

from autofit.core.knobs.knob import Knob

KNOB = Knob(
    "fsdp_offload",
    values=("none", "cpu"),
    title="Shards kept",
    short="shards offloaded",
    short_off="shards on the device",
    words={"cpu": "in host memory"},
    of_devices=True,
)
