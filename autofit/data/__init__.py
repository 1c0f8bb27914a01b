"""Training data: files become batches, and batches become micro-batches.

Importing this room loads nothing heavy.
"""
