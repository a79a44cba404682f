"""The parts of ``cluster.py``."""
