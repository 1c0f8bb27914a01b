"""data_parallel, pipeline_parallel, and the knobs that say how: several devices that train one model,
a process each."""

from autofit.core.quoting import lines_of
from autofit.export.fragments import Case, Fragments
from autofit.export.knobs.blocks import BLOCK_CLASS, BLOCKS, lists_blocks
from autofit.export.template import call, fill, import_from, template

# The dtype of products, by precision.
_AUTOCAST = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_UNREACHED = "model.set_reduce_scatter_unused_params(True)  # of experts that no token reaches here"


def data_parallel(case: Case) -> Fragments | None:
    """How weights are held, what happens between devices, and who saves."""
    kinds = {"ddp": _replicated, "fsdp": _sharded}
    value = case.config.data_parallel
    if value not in kinds:
        return None

    common = _processes(case, _named(case))
    seeded = Fragments(spread=("torch.manual_seed(args.seed + rank)  # for dropout",))
    common = common.joined(seeded)

    if case.config.loss != "standard":
        bound = "model.forward = partial(causal_loss, model)"
        own_loss = Fragments(
            standard=("from functools import partial",),
            spread=(f"{bound}  # so that it runs between the hooks below",),
        )
        common = common.joined(own_loss)

    added = kinds[value](case)
    if added is None:
        return None
    return common.joined(added)


def _processes(case: Case, named: str) -> Fragments:
    """What all processes do first, of which the first one tells."""
    backend = "gloo"
    devices: tuple[str, ...] = ()
    if case.device == "cuda":
        backend = "nccl"
        devices = ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',)

    start = (
        'if int(os.environ.get("WORLD_SIZE", 1)) != DEVICES:',
        '    raise SystemExit(f"start {DEVICES} processes with torchrun, as above")',
        *devices,
        f'dist.init_process_group("{backend}")',
        "if (rank := dist.get_rank()) > 0:",
        '    sys.stdout = open(os.devnull, "w")  # the first one tells',
    )
    return Fragments(
        standard=("import sys",),
        imports=("import torch.distributed as dist",),
        constants=(f"DEVICES = {case.layout.world}  # a process each; {named}",),
        start=start,
    )


# By schedule, the class of PyTorch's.
_SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}


def pipeline_parallel(case: Case) -> Fragments | None:
    """The blocks of each stage; None where the script has no lines for what is beside them."""
    config = case.config
    stages = case.layout.pipeline
    if stages == 1:
        return Fragments()

    schedule = str(config.pipeline_schedule)
    steps = config.gradient_accumulation_steps or 1
    kind = _SCHEDULES.get(schedule)
    if steps < stages:
        kind = "ScheduleGPipe"

    is_plain = case.layout.world == stages and config.quantization in (None, "none")
    if not case.cuts or kind is None or not is_plain or case.adapts_head:
        return None

    saved = "args.output"
    if case.lora:
        saved += ", save_embedding_layers=False"

    cuts = ", ".join(map(str, case.cuts))
    common = _processes(case, f"pipeline_parallel: {stages}")

    return common.joined(
        Fragments(
            imports=(
                BLOCK_CLASS,
                import_from("torch.distributed.pipelining", "PipelineStage", kind),
            ),
            constants=(
                f"CUTS = ({cuts})  # the first block of each stage, and the number of all",
                "TRAINED = set()  # the names of the weights that this process trains",
                "TIED = {}  # an embedding and a head of one weight, each with the group of both",
                "WHOLE = []  # what the first process puts back before it saves",
            ),
            functions=(fill(template("stages"), {"schedule": schedule, "kind": kind}),),
            spread=(
                "model = cut(model)",
                "stage = Stage(model)",
                "schedule = schedule_of(stage)",
            ),
            gather=(
                "own = {n: t.cpu() for n, t in model.state_dict().items() if n in TRAINED}",
                "parts = [None] * DEVICES if rank == 0 else None",
                "dist.gather_object(own, parts)",
            ),
            save=(
                "for module, name, value in WHOLE:",
                "    setattr(module, name, value)",
                "for part in parts:",
                "    model.load_state_dict(part, strict=False)",
                f"model.save_pretrained({saved})",
            ),
        )
    )


def _named(case: Case) -> str:
    """The knobs that chose it."""
    named = f"data_parallel: {case.config.data_parallel}"
    if case.layout.replicate > 1:
        named += f", data_parallel_replicate: {case.layout.replicate}"

    return named


def _replicated(case: Case) -> Fragments:
    """A model inside of DistributedDataParallel, which adds gradients up in the last micro-batch of
    a step."""
    options = ["model", "gradient_as_bucket_view=True"]
    if case.has_experts:
        options += ["find_unused_parameters=True"]

    arguments = "args.output"
    if case.lora:
        arguments += ", save_embedding_layers=False"
    whole = Fragments(
        imports=(import_from("torch.nn.parallel", "DistributedDataParallel"),),
        spread=tuple(call("model = DistributedDataParallel", options, indent=4)),
        save=(f"model.module.save_pretrained({arguments})",),
    )
    if case.config.gradient_accumulation_steps == 1:
        return whole

    deferred = Fragments(
        standard=("from contextlib import nullcontext",),
        around_step=("model.no_sync() if part[-1] < own[-1] else nullcontext()",),
    )

    return whole.joined(deferred)


def _sharded(case: Case) -> Fragments | None:
    """FSDP2, block by block; None for experts before PyTorch 2.13."""
    shard: tuple[str, ...] = ()
    if case.has_experts:
        torch = case.versions.get("torch", "2.13").split(".")
        if [int(part) for part in torch[:2]] < [2, 13]:
            return None
        shard = (_UNREACHED,)

    classes = ["fully_shard"]
    lines = []
    given = ["part", f"reshard_after_forward={_reshards(case)}"]
    layout = case.layout
    if layout.replicate > 1:
        sizes = f"({layout.replicate}, {layout.shard})"
        names = 'mesh_dim_names=("replicate", "shard")'
        lines += [f"mesh = dist.init_device_mesh(DEVICE, {sizes}, {names})"]
        given += ["mesh=mesh"]

    low = _AUTOCAST.get(case.config.precision)
    if low:
        dtypes = f"torch.{low}, torch.float32"
        lines += [f"policy = MixedPrecisionPolicy({dtypes}, cast_forward_inputs=False)"]
        given += ["mp_policy=policy"]
        classes += ["MixedPrecisionPolicy"]

    if case.config.fsdp_offload == "cpu":
        pinned = "" if case.device == "cuda" else "False"
        given += [f"offload_policy=CPUOffloadPolicy({pinned})"]
        classes += ["CPUOffloadPolicy"]

    has_list = case.config.compile != "none" or lists_blocks(case.config)
    slots = {
        "options": lines,
        "blocks": "blocks" if has_list else BLOCKS,
        "ends": () if case.has_new_head else _ends(case),
        "call": call("fully_shard", given, indent=8),
    }

    micro: tuple[str, ...] = ()
    if case.config.gradient_accumulation_steps != 1:
        micro = _deferred(case)
    saved = "args.output, state_dict=state"
    gathered = "full_state_dict=True, cpu_offload=True"
    if case.lora:
        saved += ", save_embedding_layers=False"
        gathered += ", ignore_frozen_params=True"

    state_dict = "torch.distributed.checkpoint.state_dict"

    return Fragments(
        imports=(
            BLOCK_CLASS,
            import_from("torch.distributed.fsdp", *sorted(classes)),
            import_from(state_dict, "StateDictOptions", "get_model_state_dict"),
        ),
        shard=(*lines_of(fill(template("shard"), slots)), *shard),
        micro=micro,
        gather=(
            f"whole = StateDictOptions({gathered})",
            "state = get_model_state_dict(model, options=whole)",
        ),
        save=(f"model.save_pretrained({saved})",),
    )


def _reshards(case: Case) -> str:
    """Whether a part gives its weights up after the forward, or to how many devices; the rest of
    the model never does."""
    reshard = case.config.reshard_after_forward
    if not reshard:
        return "False"
    if reshard is True:
        return "part is not model"

    return f"{reshard} if part is not model else False"


def _deferred(case: Case) -> tuple[str, ...]:
    """What waits for the last micro-batch of a step: gradients of adapters, which are small when
    they are whole, and what replicas exchange of others."""
    if case.lora:
        what = "gradient_sync"
    elif case.layout.replicate > 1:
        what = "all_reduce"
    else:
        return ()

    return (f"model.set_requires_{what}(part[-1] == own[-1])",)


def _ends(case: Case) -> tuple[str, ...]:
    """Embedding and head as parts of their own, unless one weight is both; a loss of its own
    multiplies by the weight of the head itself."""
    if case.model_config.get("tie_word_embeddings"):
        return ()

    embedding = "model.get_input_embeddings()"
    head = "model.get_output_embeddings()"
    if case.config.loss != "standard":
        return f"if {embedding}.weight is not {head}.weight:", f"    parts.append({embedding})"

    return (
        f"ends = [{embedding}, {head}]",
        "if ends[0].weight is not ends[1].weight:",
        "    parts += ends",
    )
