"""The study of scripts/zero_shot.py: its steps, what they train, and how they are run."""
