"""The algorithm: schedules, streams, averages, local steps. PyTorch only."""
