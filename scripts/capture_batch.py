"""Store what the head of a trained model sees in one training batch, for the study of heads.

    python scripts/capture_batch.py runs/.../model --name MODEL --pairs pairs.jsonl --output FILE

Takes a folder of train.py and a file with one query and positive per line, in the shapes that
training reads. Stored are the documents' hidden states and boundaries, the decoder's weight and
bias, and the gradient that InfoNCE over the batch and FLOPS send to the representations. A capture
is as large as its batch and holds a model's weights: it does not belong in the repository.

N documents, T tokens of all, D hidden, V vocabulary.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.head.problems import CAPTURE
from sparton.datasets.sources import text_records
from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.folders import Lengths, encoder_lengths, load_encoder
from sparton.models.splade import SpladeEncoder
from sparton.representations import Representations
from sparton.types import TokenBatch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of train.py")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", required=True, help="of the model in tables")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--flops", type=float, default=1e-3, help="weight of the regularizer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    encoder = load_encoder(arguments.model)
    if not isinstance(encoder, SpladeEncoder):
        sys.exit(f"{arguments.model} is no model of one SPLADE head")
    queries, positives = read_pairs(arguments.pairs, arguments.batch)
    lengths = encoder_lengths(arguments.model) or Lengths(64, 256)
    tokenizer = PackedTokenizer(encoder.tokenizer, *lengths, max_length=encoder.max_length)
    batches = tokenizer.queries(queries), tokenizer.documents(positives)
    stored = capture(
        encoder.to(arguments.device).eval(),
        training_objective(arguments.flops),
        *(tokens.to(arguments.device) for tokens in batches),
    )
    source = f"documents of {len(queries)} pairs of {arguments.pairs.name} under {arguments.name}"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": CAPTURE, "description": source, **stored}, arguments.output)
    (T, D), V = stored["hidden"].shape, stored["weight"].shape[0]
    print(f"{arguments.output}: N = {len(queries)}, T = {T}, D = {D}, V = {V}")


def training_objective(weight: float) -> Objective:
    regularizers = {"flops": Regularizer(flops, weight)}
    return Objective(InfoNCE(), regularizers, regularizers)


def read_pairs(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Queries drawn at random, and the first positive of each."""
    with tempfile.TemporaryDirectory() as cache:
        records = text_records(path.name, root=str(path.parent), limit=count, cache_dir=cache)
        if len(records) < count:
            sys.exit(f"{path} has {len(records)} pairs; name a longer file or --batch less")
        examples = [records.example(index, 0, 0) for index in range(count)]
    return [each.query for each in examples], [each.positive for each in examples]


def capture(
    encoder: SpladeEncoder, objective: Objective, queries: TokenBatch, documents: TokenBatch
) -> dict[str, Tensor]:
    """The operands of the documents' head, on the CPU.

    Returns:
        hidden ``[T, D]`` and weight ``[V, D]`` bfloat16, bias fp32 ``[V]``, cu_seqlens int32
        ``[N + 1]``, upstream fp32 ``[N, V]``.
    """
    device = queries.cu_seqlens.device.type
    decoder = encoder.backbone.decoder
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = encoder.backbone(documents)
        reps = (
            encoder(queries),
            encoder.head(hidden, decoder.weight, decoder.bias, documents),
        )
    query_reps, document_reps = (side.float().requires_grad_() for side in reps)
    sides = Representations(query_reps), Representations(document_reps)
    loss = objective(*sides, step=1).loss
    (upstream,) = torch.autograd.grad(loss, document_reps)
    bias = decoder.bias if decoder.bias is not None else decoder.weight.new_zeros(len(upstream[0]))
    stored = {
        "hidden": hidden.bfloat16(),
        "weight": decoder.weight.detach().bfloat16(),
        "bias": bias.detach().float(),
        "cu_seqlens": documents.cu_seqlens,
        "upstream": upstream,
    }
    return {name: x.cpu().contiguous() for name, x in stored.items()}


if __name__ == "__main__":
    main()
