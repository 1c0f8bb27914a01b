"""What train.py does in a step: its optimizer, and the forward, backward and update of a batch."""

from collections.abc import Sequence

from autofit.core.layout import Layout
from autofit.core.task import Task
from autofit.export.fragments import Fragments
from autofit.export.template import fill, template

_RUN = "schedule.step(*first, number=numbers, target=numbers, losses=losses)"
_LONG = 80  # a context and its comment, which are indented by up to three levels
_MATRICES = (
    'matrices = {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY}',
    'others = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}',
)


def optimizer_lines(fragments: Fragments, *, vectors: bool) -> tuple[list[str], list[str]]:
    """A function that makes the optimizer, and the lines that call it; or lines alone, in a script
    of several devices.

    Args:
        vectors: whether vectors are trained too, without weight decay.
    """
    assert fragments.optimizer, "the optimizer's row always makes one"
    knobs = str(fragments.comment)
    if fragments.stepped_in_backward:
        made = fragments.optimizer.format(groups="groups", lr="lr", decay="")
        function = fill(
            template("step_in_backward"),
            {
                "knobs": knobs,
                "optimizer_call": made,
            },
        )
        return [function], ["step_in_backward(model, args.lr)"]

    rate = "args.lr" if fragments.spread else "lr"
    first = "trained = [p for p in model.parameters() if p.requires_grad]"
    rest = list(fragments.stepped_parts)
    groups = "trained"
    decay = ", weight_decay=WEIGHT_DECAY"
    decayed = "the adapters"
    if vectors:
        rest += _MATRICES
        groups = "[matrices, others]"
        decay = ""
        decayed = "matrices alone"

    if fragments.faster:
        first = 'faster = [p for name, p in model.named_parameters() if "lora_B" in name]'
        wanted = 'p.requires_grad and "lora_B" not in n'
        rest = [
            f"others = [p for n, p in model.named_parameters() if {wanted}]",
            f"ratio = {fragments.faster}",
            f'groups = [{{"params": others}}, {{"params": faster, "lr": ratio * {rate}}}]',
        ]
        groups = "groups"

    made = fragments.optimizer.format(groups=groups, lr=rate, decay=decay)
    if fragments.spread:
        return [], [
            f"{first}  # {knobs}",
            *rest,
            f"optimizer = {made}",
        ]

    slots = {
        "knobs": f"{knobs}; weight decay on {decayed}",
        "lines": [first, *rest],
        "optimizer_call": made,
    }
    function = fill(template("build_optimizer"), slots)

    return [function], ["optimizer = build_optimizer(model, args.lr)"]


def kind_of_step(task: Task, layout: Layout, *, steps: int) -> str:
    """Which of the templates `step_*` it is."""
    if layout.pipeline > 1:
        return "stages"
    if layout.world > 1:
        return "ranks"
    if steps == 1:
        return "whole"
    if task.script.replays:
        return "replayed"

    return "split"


def train_step(task: Task, fragments: Fragments, kind: str) -> str:
    """The function of one of the templates `step_*`."""
    name = "batch" if kind == "whole" else "micro"
    of_several = kind in ("ranks", "stages")
    if not fragments.loss:
        loss = f"model(**{name}{task.script.forward_arguments}).loss"
    elif kind == "ranks":
        loss = f"model({name})"
    else:
        loss = f"{fragments.loss}(model, {name})"

    by_mean = of_several and not fragments.loss  # which is no number over nothing
    if kind != "whole" and not by_mean:
        loss = f"share * {loss}"
    forward = [f"loss = {loss}"]
    first: list[str] = []
    if kind == "replayed":
        asked = "represent(model, micro)"
        first = within(["torch.no_grad()", *fragments.forward], [f"vectors.append({asked})"])
        forward = [f"loss = ({asked} * slopes[part]).sum()"]

    lines = within(fragments.forward, forward)
    if by_mean:  # every process takes part in every forward, also where its samples count nothing
        lines += ["loss = loss * share if share else loss.nan_to_num() * 0"]

    backward = "loss"
    comment = ""
    if kind == "ranks":
        backward = "DEVICES * loss"
        comment = "  # gradients are averaged over the devices"

    update = ["optimizer.step()"]
    if fragments.scaler:
        backward = f"scaler.scale({backward})"
        update = ["scaler.step(optimizer)", "scaler.update()"]
    elif kind == "ranks":
        backward = f"({backward})"

    if kind != "stages":  # whose schedule calls it
        lines += [f"{backward}.backward(){comment}"]

    holder = "optimizer"
    if fragments.stepped_parts:  # the gradients of whole weights are the model's
        holder = "model"
    update += [f"{holder}.zero_grad()"]

    slots = {
        "step_arguments": step_arguments(fragments),
        "micro": fragments.micro,
        "valid": task.script.valid,
        "first": first,
        "before": within(fragments.forward, list(task.script.before_step)),
        "compute": lines if kind == "stages" else within(fragments.around_step, lines),
        "run": within(fragments.around_step, [_RUN]),
        "update": [] if fragments.stepped_in_backward else update,
    }

    return fill(template(f"step_{kind}"), slots)


def step_arguments(fragments: Fragments) -> str:
    """The arguments of the script's `train_step`."""
    arguments = ["model", "optimizer", "batch"]
    if fragments.stepped_in_backward:
        arguments = ["model", "batch"]
    if fragments.scaler:
        arguments += ["scaler"]

    return ", ".join(arguments)


def within(contexts: Sequence[str], lines: list[str]) -> list[str]:
    """The lines inside all contexts, the first one outermost; a comment stays behind the colon, or
    above a long one."""
    if not lines:
        return lines

    for context in reversed(contexts):
        code, mark, comment = context.partition("  # ")
        opening = [f"with {code}:{mark}{comment}"]
        if len(context) > _LONG:
            opening = [f"# {comment}", f"with {code}:"]
        lines = opening + indented(lines)

    return lines


def indented(lines: Sequence[str]) -> list[str]:
    """The lines, four columns further in."""
    return [f"    {line}" for line in lines]
