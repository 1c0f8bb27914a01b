"""One command that checks and measures autofit on a CUDA machine: `python -m benchmarks.gpu`.

A card is at hand for minutes at a time, so every figure is stored as soon as it is known, a later call goes on where
the former one was stopped, and all that is told of the figures is made from what is stored. One file for each stage;
what they share is in `bench`, `store`, `cases` and `measured`.
"""
