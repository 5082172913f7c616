"""What follows ``sparton`` on a command line, a module for each; ``main`` takes the rest of it."""
