"""What ``train.py`` and ``evaluate.py`` make of a configuration; the only room that knows Hydra."""
