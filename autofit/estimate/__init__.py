"""Estimates: memory and time of any Config, from a trace of the real training step on tensors
without storage.

Needs neither the device nor weights. `predict` estimates one Config in full, `predict_all` the main
figures of thousands; `learn` corrects predictions by measurements.
"""
