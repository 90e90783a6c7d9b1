"""One file per batch rule, and the table of modes."""
