"""Processes at a site: a warm trainer, several processes, Flower's own processes."""
