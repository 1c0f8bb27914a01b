"""How time and memory grow with data, models and results."""
