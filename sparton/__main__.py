"""``python -m sparton`` is the command ``sparton``."""

from sparton.cli.main import main

if __name__ == "__main__":
    main()
