"""What goes into an export (ExportSource), and what a tool runs differently from what was measured
(Deviation)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, is_whole
from autofit.core.layout import Layout
from autofit.export.pictures import Pictures

WEIGHTS = "path/to/weights"  # for a model whose weights have no known name or directory
LEARNT = {  # of the data that a search knew, by the fields of its rows
    "text": "all tokens are learnt",
    "prompt+completion": "the completions are learnt",
    "messages": "the assistant's turns are learnt",
}
NOTHING_MEASURED = "Nothing was measured of this config: it is predicted."


@dataclass(frozen=True)
class Deviation:
    """A knob, its measured value, and what the tool does instead, as half a sentence."""

    knob: str
    value: Value
    instead: str
    may_not_fit: bool = False  # the tool may need more memory than was measured

    def __str__(self) -> str:
        value = "null"
        if self.value is not None:
            value = str(self.value).lower()
        return f"{self.knob} {value}: {self.instead}."

    @property
    def message(self) -> str:
        """The sentence, and whether the config may no longer fit."""
        if not self.may_not_fit:
            return str(self)
        return f"{self} It may no longer fit."


def cached_casts(title: str, config: Config) -> tuple[Deviation, ...]:
    """Deviation of a tool whose autocast caches low-precision copies of weights.

    Checkpointed blocks would make these anew, and the precision knob does not keep them.
    """
    is_mixed = config.precision.endswith("-mixed") and config.data_parallel != "fsdp"
    if not is_mixed or config.lora_rank or config.activation_checkpointing == "none":
        return ()

    dtype = config.precision.removesuffix("-mixed")
    copies = f"{title} keeps a copy of every weight in {dtype} until a forward is over"
    return (Deviation("precision", config.precision, copies, may_not_fit=True),)


@dataclass(frozen=True)
class ExportSource:
    """A result's config, and what other tools must know of its model; nearly all of it stands in a
    result.yaml."""

    model: str
    config: Config
    hardware: Mapping[str, Any]
    task: str = "custom"
    sequence_length: int | None = None
    effective_batch_size: int | None = None
    apart: bool = False  # packed samples do not see one another
    packing: bool | None = (
        None  # whether samples are put one after the other, or padded; None: no data is known
    )
    data: str | None = None  # the file that the search knew
    form: str | None = None  # one of LEARNT
    measured: Mapping[str, Any] | None = None
    predicted: Mapping[str, Any] | None = None  # the figures, where nothing was measured
    versions: Mapping[str, str] = field(default_factory=dict)
    weights: str = WEIGHTS  # a hub id or a directory
    teacher: str = WEIGHTS  # the same of the model that this one learns from
    targets: tuple[str, ...] = ()  # the layers that get adapters, as peft matches names
    outputs: tuple[str, ...] = ()  # those of them that compute the model's outputs
    heads: tuple[str, ...] = ()  # the layers trained whole beside adapters
    # the parameters that hold the weights of experts, where there are adapters
    experts: tuple[str, ...] = ()
    adapted_experts: tuple[str, ...] = ()  # those of them that get adapters
    # of the loss of the task, such as beta; others are as the task has them
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    rounds: bool = False  # whether it is trained for quantised inference
    unsaid: str | None = None  # what differs of the model or its samples, and no tool is told
    parts: tuple[str, ...] = ()  # what alone is trained of the model, where not all of it is
    off: Mapping[str, Value] = field(default_factory=dict)  # of every registered knob
    pictures: Pictures | None = None  # the denoiser and its data, of a task that has one
    own_loss: str | None = None  # the tool whose own loss takes the place of the model's
    # the tool's keys of how samples are generated, where the training does
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.hardware.get("device", "cuda"))

    @property
    def layout(self) -> Layout:
        """How the devices are divided."""
        return Layout.of(self.config)

    @property
    def origin(self) -> str:
        """Where the figures come from."""
        if self.predicted:
            return "predicted"
        return "measured"

    @property
    def adapts_head(self) -> bool:
        """Whether the output head gets an adapter."""
        return bool(self.outputs) or self.config.lora_targets == "all-linear+head"

    def layers(self, default: Any) -> Any:
        """The targets as a list; `default` where they are not known."""
        if not self.targets and not self.adapted_experts:
            return default
        return list(self.targets)

    @property
    def inner_targets(self) -> list[str]:
        """The targets without the output head."""
        return [name for name in self.targets if name not in self.outputs]


def nodes_of(hardware: Mapping[str, Any], layout: Layout) -> int:
    """The number of machines that a layout's devices are in; 1 where the facts do not say."""
    nodes = hardware.get("nodes")
    if not is_whole(nodes, 1) or layout.world % nodes:
        return 1
    return nodes


def torchrun(layout: Layout, nodes: int) -> str:
    """What starts a process for each device; on several machines two lines, to be run on each of
    them."""
    command = f"torchrun --nproc-per-node {layout.world // nodes}"
    if nodes == 1:
        return command

    meeting = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    return f'NODES="{meeting}"\n{command} $NODES'


def batch_sizes(config: Config, effective: int | None) -> tuple[int, int]:
    """The micro-batch and how many of them make a step.

    Raises:
        InputError: they are missing, or do not make the effective batch.
    """
    sizes = []
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        size = config[name]
        if not isinstance(size, int) or size < 1:
            remedy = (
                "Give micro_batch_size and gradient_accumulation_steps, as a search writes them."
            )
            raise InputError(f"{name} must be a whole number here, not {size!r}.", remedy)
        sizes.append(size)

    micro, steps = sizes
    check_batch_sizes(micro, steps, effective, Layout.of(config))
    return micro, steps


def batches_fit(source: ExportSource) -> str | None:
    """For `refuse` of a tool: what is wrong with the batch sizes, or None."""
    try:
        batch_sizes(source.config, source.effective_batch_size)
    except InputError as error:
        return error.message

    return None


def check_batch_sizes(
    micro: int,
    steps: int,
    effective: int | None,
    layout: Layout,
) -> None:
    """Hold the micro-batches of a step against the effective batch, if that is known.

    Raises:
        InputError: they do not make it.
    """
    if effective is None or effective == micro * steps * layout.dp_degree:
        return

    sizes = f"micro_batch_size {micro} x gradient_accumulation_steps {steps}"
    if layout.dp_degree > 1:
        sizes += f" on each of {layout.dp_degree} devices"
    message = f"{sizes} is not the effective batch of {effective}."
    raise InputError(message, "Search again, or correct the config.")
