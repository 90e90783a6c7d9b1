"""The command line: ``tidegate serve``, ``profile``, ``bench``, ``simulate``, ``plan``, ``doctor``."""

from tidegate.cli.commands import main, parser

__all__ = ["main", "parser"]
