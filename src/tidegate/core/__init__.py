"""The core: events in, actions out; no clock, no I/O, no torch."""
