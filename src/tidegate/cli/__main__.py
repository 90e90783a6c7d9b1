"""``python -m tidegate.cli``, which is ``tidegate``."""

from tidegate.cli.commands import main

if __name__ == "__main__":
    main()
