"""Collections to search, examples to train on, and the batches made of them."""
