"""Plain values shared by every package: requests, batches, events, actions, errors and the clock."""
