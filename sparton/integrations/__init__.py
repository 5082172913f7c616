"""Drop-ins for libraries that people train with already."""
