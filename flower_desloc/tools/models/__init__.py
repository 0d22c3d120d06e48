"""What becomes of a run's model: handed on, scored, looked at."""
