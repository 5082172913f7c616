"""What can be asked of a training; it is checked without PyTorch, before anything is read."""

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "bf16_pure")
OF_SOME_DEVICES = ("fp16", "fp8")  # precisions that others lack
SELECT_BY = "ndcg@10"  # the dev metric that chooses the model
SHARDINGS = ("none", "full")
FITTING = "auto"  # the micro-batch that is searched for
