"""What follows ``sparton`` on a command line, a module for each."""
