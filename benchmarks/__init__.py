"""Figures of dtorch_ops, each beside a baseline that is measured in the same run."""
