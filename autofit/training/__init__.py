"""Training: one build and one loop, which the probe and the user's own training share."""
