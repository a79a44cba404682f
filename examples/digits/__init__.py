"""The parts of ``train_digits.py``."""
