"""The parts of ``worker_pool.py``."""
