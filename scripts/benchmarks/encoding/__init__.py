"""Rates at which whole collections are encoded."""
