"""The core on a virtual clock, with lanes that predict instead of compute."""
