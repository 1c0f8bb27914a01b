"""What grows with the data, the model and the results: `python -m benchmarks.scale`."""
