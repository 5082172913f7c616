"""The commands that take flags, one module each; ``main`` takes what follows the command's name."""
