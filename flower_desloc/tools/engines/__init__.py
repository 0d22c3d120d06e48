"""The ways to run the two apps: in one process, in simulation, in a deployment."""
