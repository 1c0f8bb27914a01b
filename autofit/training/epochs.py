"""Endless epochs over a loader, resumable in the middle of one, also with another batch size.

Each epoch starts with random numbers of its own, so a shuffling loader has the same order when a
run resumes. The place is kept in samples. A loader that can save and load its position (torchdata's
StatefulDataLoader protocol: `state_dict`, `load_state_dict`) does so; any other is read again up to
the sample where the run stopped.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autofit.core.errors import describe_error, pluralize
from autofit.data.batch import Cut, sample_count, samples_of, tensors
from autofit.data.samples import FileLoader
from autofit.training import random_state
from autofit.training.host_tensors import bytes_of
from autofit.training.local_batch import LocalBatch, LocalIndices
from autofit.training.workload import batches_of, empty_pass, is_stateful, samples_in_pass

_END = object()  # of a pass: a loader may give anything else as a batch

State = Mapping[str, Any]  # as `Epochs.state` makes it
Notes = list[str]  # sentences for the user


class Epochs(Iterator[Any]):
    """The batches of one training run, without an end; epoch n draws from seed + n.

    `done` is told of every step, so that the place is that of what was trained on. `batch_size`:
    samples of a usual batch; None where that is not known.
    """

    def __init__(
        self, loader: Any, seed: int, *, batch_size: int | None = None, cut: Cut | None = None
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._batch_size = batch_size
        self._cut = cut
        self._is_stateful = is_stateful(loader)
        self._pass_samples = samples_in_pass(loader)

        self._pass: Iterator[Any] = iter(())
        self._rest: Any = None  # of a batch that was begun before the run stopped
        self._last: Any = None  # the whole batch that is done last, until the next one is read
        self._given: Any = None
        self.passes_begun = 0
        self.batches_done = 0  # in the pass under way
        self._samples_done = 0  # in the pass under way

    def __next__(self) -> Any:
        place = self.passes_begun, self.batches_done, self._samples_done, self._last
        try:
            return self._read_next()
        except Exception:  # the loader's: the place stays behind what is done
            self.passes_begun, self.batches_done, self._samples_done, self._last = place
            raise

    def _read_next(self) -> Any:
        """The next batch, of the next pass where this one ends."""
        self._given = None
        self._last = None
        if self._rest is not None:
            rest = self._rest
            self._rest = None
            return rest

        batch = next(self._pass, _END)
        if batch is _END:
            if self.passes_begun and self._pass_samples is None:
                self._pass_samples = self._samples_done
            self._begin_pass()
            batch = next(self._pass, _END)
            if batch is _END:
                raise empty_pass()

        self._given = batch
        return batch

    def _begin_pass(self) -> None:
        """Begin a pass with random numbers of its own."""
        self._pass = iter(())  # the workers of the last pass end before others start

        random_state.seed_host(self._seed + self.passes_begun)
        self.passes_begun += 1
        self.batches_done = 0
        self._samples_done = 0
        self._pass = batches_of(self._loader)

    def done(self, samples: int) -> None:
        """Note that the last batch, of so many samples, is trained on."""
        self.batches_done += 1
        self._samples_done += samples
        self._last = self._given

    def batches_left(self, pass_length: int, passes: int) -> int:
        """The batches that are left of so many passes; negative where there were more already."""
        left = (passes - self.passes_begun) * pass_length
        if self.passes_begun:
            left += pass_length - self.batches_done
        return left

    @property
    def position(self) -> str:
        """The batch after those that are done, and its epoch, both counted from 0."""
        return f"batch {self.batches_done} of pass {self.passes_begun - 1}"

    def state(self, *, with_loader: bool = True) -> dict[str, Any]:
        """The place after what is done, with the loader's own state where it has one."""
        state = {
            "passes": self.passes_begun,
            "given": self.batches_done,
            "samples": self._samples_done,
            "batch_size": self._batch_size,
            "pass_samples": self._pass_samples,
            "last": self._digest(self._last),
        }
        if with_loader and self._is_stateful:
            state["loader"] = self._loader.state_dict()
        return state

    def skip(self, state: State, device: torch.device) -> Notes:
        """Go on at a place; draws no random number.

        Returns sentences about samples that are skipped or repeated.
        """
        if not state["passes"]:
            return []

        notes = self._changed_length(state)
        with random_state.preserved(device):
            if not self._is_stateful or "loader" not in state:
                return notes + self._read_up_to(state)
            try:
                self._loader.load_state_dict(state["loader"])
            # whatever a loader of somebody's raises: its batches can still be counted
            except Exception as error:
                notes.append(
                    f"the loader does not take its own state ({describe_error(error)}): "
                    "it is read again up to its place."
                )
                return notes + self._read_up_to(state)
            return notes + self._continue_loader(state)

    def skip_batches(self, batches: int, device: torch.device) -> None:
        """Go on behind so many batches, all that checkpoints of an earlier autofit know."""
        with random_state.preserved(device):
            for _ in range(batches):
                self.done(self._count(next(self)))

    def _continue_loader(self, state: State) -> Notes:
        """Go on with a loader that has its own state, perhaps with another batch size."""
        is_resized = self._is_resized(state)
        samples = state["samples"]
        self.passes_begun = state["passes"]
        self._samples_done = samples
        self.batches_done = state["given"]
        if is_resized and self._batch_size:
            self.batches_done = samples // self._batch_size

        # without a batch, if the run stopped at the end of an epoch
        self._pass = batches_of(self._loader)

        if not is_resized:
            return []
        if isinstance(self._loader, FileLoader):  # which counts samples
            return _note_within(samples % self._loader.batch_size, self._loader.batch_size)
        return [
            "the loader goes on by its own state, saved after "
            f"{pluralize(samples, 'sample')} of pass {state['passes'] - 1} with batches of "
            f"{state['batch_size']}: if that counts batches instead of samples, some are skipped "
            "or repeated."
        ]

    def _read_up_to(self, state: State) -> Notes:
        """Read the loader again up to the place.

        It is found by batches, or where those have another size now, by samples.
        """
        self.passes_begun = 0
        for _ in range(state["passes"] - 1):
            self._begin_pass()
            for _ in self._pass:
                pass

        self._begin_pass()
        wanted = state["samples"]
        is_resized = self._is_resized(state)
        if is_resized and isinstance(self._loader, LocalIndices):
            return self._begin_at_index(self._loader, wanted)

        batch: Any = None
        is_drawn = False  # whether the last batch depends on random numbers, as augmented images do
        while not self._is_at(state):
            before = random_state.capture(torch.device("cpu"))
            batch = next(self._pass, _END)
            if batch is _END:
                return [
                    f"the data end after {pluralize(self._samples_done, 'sample')} of pass "
                    f"{self.passes_begun - 1}, before the {wanted} that were trained on in it: "
                    "training goes on with the next pass."
                ]

            is_drawn = not random_state.is_at(before)
            count = self._count(batch)
            if is_resized and self._samples_done + count > wanted:
                return self._begin_within(batch, wanted - self._samples_done, count)
            self.done(count)

        if is_resized or is_drawn:
            return []
        return self._changed_batch(batch, state)

    def _is_at(self, state: State) -> bool:
        """Whether the pass under way has been read up to the place."""
        if self._is_resized(state):
            return bool(self._samples_done >= state["samples"])
        return bool(self.batches_done >= state["given"])

    def _begin_at_index(self, loader: LocalIndices, sample: int) -> Notes:
        """Go on at a sample of a pass that is read by indices, each rank its own."""
        assert self._batch_size, "it differs from another one"
        self._pass = loader.batches_from(sample)

        self._samples_done = sample
        self.batches_done, begun = divmod(sample, self._batch_size)
        return _note_within(begun, self._batch_size)

    def _begin_within(self, batch: Any, begun: int, count: int) -> Notes:
        """Go on in a batch, behind the samples that were trained on.

        A batch that cannot be cut is trained on again as a whole.
        """
        if isinstance(batch, LocalBatch) or self._cut is not None:
            self._rest = batch
            return [
                f"{pluralize(begun, 'sample')} of a batch of {count} are trained on again: "
                "it cannot be cut there."
            ]

        self._rest = samples_of(batch, begun, count)
        self._samples_done += begun
        return _note_within(begun, count)

    def _is_resized(self, state: State) -> bool:
        """Whether batches are known to have another size than before."""
        before = state["batch_size"]
        now = self._batch_size
        return before is not None and now is not None and before != now

    def _changed_length(self, state: State) -> Notes:
        """What is to be said where the data set has another length now."""
        before = state["pass_samples"]
        now = self._pass_samples
        if before is None or now is None or before == now:
            return []
        return [
            f"the data set has {pluralize(now, 'sample')} now, and had {before} when the "
            "checkpoint was made: in the pass under way samples may be skipped or repeated, since "
            "a shuffled set has another order then."
        ]

    def _changed_batch(self, batch: Any, state: State) -> Notes:
        """What is to be said where the last batch before the place is another one now."""
        before = state["last"]
        now = self._digest(batch)
        if before is None or now is None or before == now:
            return []
        return [
            f"what was read before the place, after {pluralize(state['samples'], 'sample')} of "
            f"pass {self.passes_begun - 1}, is not what the checkpoint says: the data or their "
            "order are other ones now, so that samples may be skipped or repeated."
        ]

    def _count(self, batch: Any) -> int:
        """The samples of a batch, of all ranks."""
        if isinstance(batch, LocalBatch):
            return batch.samples
        return sample_count(batch, self._cut)

    def _digest(self, batch: Any) -> int | None:
        """A checksum of a batch's first sample; None where ranks hold different ones."""
        if batch is None or isinstance(batch, LocalBatch):
            return None

        crc = 0
        for tensor in tensors(samples_of(batch, 0, 1, self._cut)):
            if tensor.layout is torch.strided:
                crc = zlib.crc32(bytes_of(tensor), crc)
        return crc


def _note_within(begun: int, count: int) -> Notes:
    """A note on training that goes on in a batch of which some samples were trained on."""
    if not begun:
        return []
    were = "was" if begun == 1 else "were"
    return [
        f"training goes on within a batch of {count}: its first {pluralize(begun, 'sample')} "
        f"{were} trained on before, and the next step learns the rest."
    ]
