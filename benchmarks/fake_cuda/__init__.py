"""CUDA without a card: `python -m benchmarks.fake_cuda [--name NAME] [--gib N] [--context-mib N] -- COMMAND...`.

Where no card is at hand, this rehearses what runs on CUDA only, and holds predictions of memory against PyTorch's own
allocator. A small library stands before the CUDA runtime, the driver, cuBLAS and NVML of a CUDA build of PyTorch
(CUDA 13; `pip install torch` on Linux), and the command runs as on a machine with one card.

What is real: PyTorch, with all that it does on the host; its caching allocator, so also peaks of memory, what is
reserved, what a process may take of the card, and running out; what each process holds, for all others and nvidia-smi;
the compiler and Triton, for a card of compute capability 9.0, which it is whatever its name.

What is not: kernels do nothing, so times and values say nothing. A copy or a fill of more than 64 KiB is not done. One
byte read alone from the card is 1, so that "is the whole mask set?" is answered by yes. Graphs of CUDA cannot be
captured, and cuDNN is not there: attention by it is turned off, and what else needs it ends in its error. A process
that was killed holds its memory until its parent has asked for its exit status.

The command must use the Python environment that this runs in. It gets a cache of its own (XDG_CACHE_HOME), so that
autofit does not take what it measured here for a real card's; what else it writes, have it write where nobody will.
FAKE_CUDA_TALK=1 has the library say which functions of the driver it lacks and which processes open the card.
"""
