"""Apps, tasks and optimizers to start from; a package, so that no other `examples` hides it."""
