"""Flower's SuperLink and SuperNodes as processes: environment, keys and certificates."""
