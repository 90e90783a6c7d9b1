"""One file per model family, and what reads their weights."""
