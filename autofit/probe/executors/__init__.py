"""Where probes run: one executor a file."""
