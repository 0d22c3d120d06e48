"""Build the objects of a run from its configuration, and check that it fits."""
