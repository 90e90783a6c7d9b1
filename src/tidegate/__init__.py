"""Tidegate: an LLM server whose prefill and decode share one GPU's memory and divide its compute."""

__version__ = "0.1.0"
