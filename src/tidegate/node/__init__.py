"""Runs a core on the wall clock, with lanes as processes or threads, and speaks to the server."""
