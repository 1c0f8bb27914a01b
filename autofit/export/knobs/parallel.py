"""data_parallel, and the knobs that say how: several devices that train one model, a process each."""

from autofit.core.quoting import lines_of
from autofit.export.fragments import Case, Fragments
from autofit.export.knobs.blocks import BLOCK_CLASS, BLOCKS
from autofit.export.template import call, fill, import_from, template

_UNREACHED = "model.set_reduce_scatter_unused_params(True)  # of experts that no token reaches here"


def data_parallel(case: Case) -> Fragments | None:
    """How weights are held, what happens between devices, and who saves."""
    kinds = {"ddp": _replicated, "fsdp": _sharded}
    value, nccl = case.config.data_parallel, case.device == "cuda"
    if value not in kinds:
        return None
    started = (
        'if int(os.environ.get("WORLD_SIZE", 1)) != DEVICES:',
        '    raise SystemExit(f"start {DEVICES} processes with torchrun, as above")',
        *(['torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'] if nccl else []),
        f'dist.init_process_group("{"nccl" if nccl else "gloo"}")',
        "if (rank := dist.get_rank()) > 0:",
        '    sys.stdout = open(os.devnull, "w")  # the first one tells',
    )
    common = Fragments(
        standard=("import sys",),
        imports=("import torch.distributed as dist",),
        constants=(f"DEVICES = {case.layout.world}  # a process each; {_named(case)}",),
        start=started,
        spread=("torch.manual_seed(args.seed + rank)  # for dropout",),
    )
    if case.config.loss != "standard":
        within = (
            "model.forward = partial(causal_loss, model)  # so that it runs between the hooks below"
        )
        common = common.joined(
            Fragments(standard=("from functools import partial",), spread=(within,))
        )
    added = kinds[value](case)
    return common.joined(added) if added else None


def _named(case: Case) -> str:
    """The knobs that chose it."""
    replicas = (
        f", data_parallel_replicate: {case.layout.replicate}" if case.layout.replicate > 1 else ""
    )
    return f"data_parallel: {case.config.data_parallel}{replicas}"


def _replicated(case: Case) -> Fragments:
    """A model inside of DistributedDataParallel, which adds gradients up in the last micro-batch of a step."""
    split = case.config.gradient_accumulation_steps != 1
    options = [
        "model",
        "gradient_as_bucket_view=True",
        *["find_unused_parameters=True"] * case.has_experts,
    ]
    later = "model.no_sync() if part[-1] < own[-1] else nullcontext()"
    adapters = "model.module.save_pretrained(args.output, save_embedding_layers=False)"
    return Fragments(
        standard=("from contextlib import nullcontext",) if split else (),
        imports=(import_from("torch.nn.parallel", "DistributedDataParallel"),),
        around_step=(f"{later}",) if split else (),
        spread=tuple(call("model = DistributedDataParallel", options, indent=4)),
        save=(adapters if case.lora else "model.module.save_pretrained(args.output)",),
    )


def _sharded(case: Case) -> Fragments | None:
    """FSDP2, block by block."""
    if case.has_experts and [
        int(part) for part in case.versions.get("torch", "2.13").split(".")[:2]
    ] < [2, 13]:
        return None
    layout, reshard = case.layout, case.config.reshard_after_forward
    classes, lines = ["fully_shard"], []
    kept = "part is not model" if reshard is True else f"{reshard} if part is not model else False"
    options = {"reshard_after_forward": kept if reshard else "False"}
    if layout.replicate > 1:
        sizes = f"({layout.replicate}, {layout.shard})"
        lines.append(
            f'mesh = dist.init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
        )
        options["mesh"] = "mesh"
    if low := {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}.get(case.config.precision):
        lines.append(
            f"policy = MixedPrecisionPolicy(torch.{low}, torch.float32, cast_forward_inputs=False)"
        )
        options["mp_policy"] = "policy"
        classes.append("MixedPrecisionPolicy")
    if case.config.fsdp_offload == "cpu":
        options["offload_policy"] = (
            "CPUOffloadPolicy()" if case.device == "cuda" else "CPUOffloadPolicy(False)"
        )
        classes.append("CPUOffloadPolicy")
    given = ["part", *(f"{name}={value}" for name, value in options.items())]
    listed = case.config.compile != "none" or case.config.activation_checkpointing == "alternate"
    slots = {
        "options": lines,
        "blocks": "blocks" if listed else BLOCKS,
        "ends": () if case.has_new_head else _ends(case),
        "call": call("fully_shard", given, indent=8),
    }
    adapters = ", ignore_frozen_params=True" if case.lora else ""
    save = "model.save_pretrained(args.output, state_dict=state"
    return Fragments(
        imports=(
            BLOCK_CLASS,
            import_from("torch.distributed.fsdp", *sorted(classes)),
            import_from(
                "torch.distributed.checkpoint.state_dict",
                "StateDictOptions",
                "get_model_state_dict",
            ),
        ),
        shard=(
            *lines_of(fill(template("shard"), slots)),
            *([_UNREACHED] if case.has_experts else []),
        ),
        micro=_deferred(case) if case.config.gradient_accumulation_steps != 1 else (),
        gather=(
            f"whole = StateDictOptions(full_state_dict=True, cpu_offload=True{adapters})",
            "state = get_model_state_dict(model, options=whole)",
        ),
        save=(f"{save}, save_embedding_layers=False)" if case.lora else f"{save})",),
    )


def _deferred(case: Case) -> tuple[str, ...]:
    """What waits for the last micro-batch of a step: gradients of adapters, which are small when they are whole, and
    what replicas exchange of others."""
    what = "gradient_sync" if case.lora else "all_reduce" if case.layout.replicate > 1 else ""
    return (f"model.set_requires_{what}(part[-1] == own[-1])",) if what else ()


def _ends(case: Case) -> tuple[str, ...]:
    """Embedding and head as parts of their own, unless one weight is both; a loss of its own multiplies by the weight
    of the head itself."""
    if case.model_config.get("tie_word_embeddings"):
        return ()
    embedding, head = "model.get_input_embeddings()", "model.get_output_embeddings()"
    if case.config.loss != "standard":
        return f"if {embedding}.weight is not {head}.weight:", f"    parts.append({embedding})"
    return (
        f"ends = [{embedding}, {head}]",
        "if ends[0].weight is not ends[1].weight:",
        "    parts += ends",
    )
