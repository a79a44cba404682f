"""The parts of ``profile_fetch.py``."""
