"""Attention, experts and the small kernels, one backend a file."""
