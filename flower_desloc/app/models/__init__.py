"""A run's model: export, evaluation, text generation."""
