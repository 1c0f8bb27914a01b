"""The nouns of autofit: plain data that every other room speaks, free of torch and optuna."""
