"""What transformers works out in each process that makes a model, in a fifth of a second: imported where tests'
processes are forked from. It is regular expressions alone."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
