"""Latency: what it is measured as, predicted by, and controlled with."""
