"""Studies: a grid of runs, each tuned and repeated over seeds, with a table and figures."""
