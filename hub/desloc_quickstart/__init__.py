"""A Flower app that trains a classifier of handwritten digits by DES-LOC."""
