"""Hardware: detection of what is present, the catalogue of cards, and the accounting of their
memory."""
