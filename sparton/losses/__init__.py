"""What is minimised: ranking losses, sparsity regularizers, and the objective that adds them up."""
