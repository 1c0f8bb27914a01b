"""What reproduces each figure that the README claims."""
