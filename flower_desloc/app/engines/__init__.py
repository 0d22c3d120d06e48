"""Engines that run the two apps: one process, Flower's simulation, a deployment."""
