"""Flower's processes for real: keys, certificates, a SuperNode, and who takes them down."""
