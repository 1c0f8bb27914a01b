"""PyTorch's mode of fake tensors without the checks that it makes at every operator, which take
half of a trace."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

# How code names its parts for a profiler; FSDP does so at each step of its own.
_RANGES = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)

# Arguments that are a part of a key as they are.
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class QuickFakes(FakeTensorMode):
    """Fake tensors, with shorter keys of what is remembered of operators, and results made from
    that at once.

    The results are those of `FakeTensorMode`, to the stride and the storage.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # By device the one that a new fake tensor is said to be on, and all that it holds beside
        # its shape.
        self._fresh: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to keep a compiler out at every operator, for a tenth of a trace: it is out of
        all of a trace."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # Neither is remembered by PyTorch.
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default
        elif func in _RANGES:
            with no_dispatch():
                return func(*args, **(kwargs or {}))

        return self.dispatch(
            func,
            types,
            args,
            kwargs or {},
        )

    def _get_output_tensor_from_cache_entry(
        self,
        state: Any,
        entry: Any,
        key: Any,
        func: Any,
        args: Any,
    ) -> FakeTensor | None:
        made = entry.metadata
        fresh = self._fresh.get(made.device) if made is not None else None
        if (
            fresh is None
            or entry.inplace_idx is not None
            or made.layout is not torch.strided
            or made.is_conj
            or made.is_neg
        ):
            fake = super()._get_output_tensor_from_cache_entry(
                state,
                entry,
                key,
                func,
                args,
            )

            if made is not None and entry.inplace_idx is None and fake is not None:
                self._fresh.setdefault(
                    made.device,
                    (fake.fake_device, dict(fake.__dict__)),
                )

            return fake

        with no_dispatch():
            if isinstance(func, OpOverload) and func.is_view:
                storage = args[entry.view_idx].untyped_storage()
                meta = torch.empty(0, dtype=made.dtype, device="meta")
                meta.set_(
                    storage,
                    made.storage_offset,
                    made.shape,
                    made.stride,
                )
            else:
                meta = torch.empty_strided(
                    made.shape,
                    made.stride,
                    dtype=made.dtype,
                    device="meta",
                )

        device, attributes = fresh
        fake = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            made.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)

        return fake

    def _prep_args_for_hash(
        self,
        result: list[Any],
        args: Any,
        state: Any,
        id_hashed_objects: list[Any],
    ) -> None:
        given = args
        if isinstance(args, dict):
            given = (*args.keys(), *args.values())

        key: list[Any] = [QuickFakes]
        for arg in given:
            if type(arg) is FakeTensor and self._is_plain(arg):
                key += self._key_of(arg)
            elif type(arg) in _PLAIN:
                key += type(arg), arg
            elif type(arg) in (list, tuple):
                self._prep_args_for_hash(key, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(
                    result,
                    args,
                    state,
                    id_hashed_objects,
                )
                return

        result.append(tuple(key))

    def _is_plain(self, fake: FakeTensor) -> bool:
        is_own = fake.fake_mode is self
        return is_own and fake.layout is torch.strided and fake.constant is None

    def _key_of(self, fake: FakeTensor) -> tuple[Any, ...]:
        """All that the result of an operator may depend on."""
        nbytes = fake.untyped_storage().nbytes()
        return (
            fake.dtype,
            fake.shape,
            fake.stride(),
            fake.storage_offset(),
            nbytes,
            fake.fake_device,
            fake.requires_grad,
            fake.is_inference(),
            fake.is_conj(),
            fake.is_neg(),
        )
