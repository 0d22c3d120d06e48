"""From a configuration to the objects of a run, and the check that it fits."""
