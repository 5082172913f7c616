"""Where a training's messages go that no command has set up logging for."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORM = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # Hydra's


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """What this package tells goes to a file, and to standard output where nothing listens.
    Afterwards logging is as it was."""
    logger = logging.getLogger("sparton")
    handlers: list[logging.Handler] = [logging.FileHandler(file, encoding="utf-8")]
    if not logger.hasHandlers():
        handlers.append(logging.StreamHandler(sys.stdout))
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORM))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
