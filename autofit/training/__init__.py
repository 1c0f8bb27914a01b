"""Training: one build and one loop, shared by probes and the user's own training."""
