"""Runs one batch: inputs, model, sampler."""
