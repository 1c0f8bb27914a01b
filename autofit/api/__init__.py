"""What users call from Python, one verb a file."""
