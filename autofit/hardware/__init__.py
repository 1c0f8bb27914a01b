"""Memory: what is used (the storage tracker) and what there is (device detection)."""
