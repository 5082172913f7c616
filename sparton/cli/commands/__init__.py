"""Commands with options of their own: `sparton NAME`."""
