"""Late interaction with compressed documents."""
