"""Store what the head of a trained model sees in one training batch, for benchmark_head.py.

    python scripts/capture_batch.py runs/.../model --pairs pairs.jsonl --output captured.pt

Takes a folder of train.py and a file with one query and positive per line, in the shapes that
training reads. Stored are the documents' hidden states and boundaries, the decoder's weight and
bias, and the gradient that InfoNCE over the batch and FLOPS send to the representations. A capture
is as large as its batch and holds a model's weights: it does not belong in the repository.

N documents, T tokens of all, D hidden, V vocabulary.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from sparton.datasets.files import RecordError
from sparton.datasets.records import TEXTS, parse_record
from sparton.datasets.tokenization import PackedTokenizer
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.losses.regularizers import Regularizer, flops
from sparton.models.folders import encoder_lengths, load_encoder
from sparton.models.splade import SpladeEncoder
from sparton.representations import Representations
from sparton.types import TokenBatch

FORMAT = "captured SPLADE batch"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of train.py")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", help="of the model in tables; default: that of its run's folder")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--query-length", type=int, help="default: as the model was trained")
    parser.add_argument("--document-length", type=int, help="default: as the model was trained")
    parser.add_argument("--flops", type=float, default=1e-3, help="weight of the regularizer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    name = arguments.name or model_name(arguments.model)
    if not name:
        parser.error(f"{arguments.model} does not say which model it holds: --name says it")
    encoder = load_encoder(arguments.model).to(arguments.device).eval()
    trained = encoder_lengths(arguments.model)
    lengths = (
        arguments.query_length or (trained.query if trained else 64),
        arguments.document_length or (trained.document if trained else 256),
    )
    tokenizer = PackedTokenizer(encoder.tokenizer, *lengths, max_length=encoder.backbone.max_length)
    queries, positives = zip(*read_pairs(arguments.pairs, arguments.batch), strict=True)
    batches = tokenizer.queries(queries), tokenizer.documents(positives)
    objective = training_objective(arguments.flops)
    stored = capture(encoder, objective, *(tokens.to(arguments.device) for tokens in batches))
    source = f"{len(queries)} pairs of {arguments.pairs.name} under {name}"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    words = {"format": FORMAT, "description": f"documents of {source}"}
    torch.save(words | stored, arguments.output)
    (T, D), V = stored["hidden"].shape, stored["weight"].shape[0]
    print(f"{arguments.output}: N = {len(queries)}, T = {T}, D = {D}, V = {V}")


def model_name(folder: Path) -> str:
    """What distinguishes a model: its folder's name, or that of the run which wrote ``model``, with
    the folder of its overrides where the run's own name is but its seed."""
    folder = folder.resolve()
    run = folder.parent if folder.name == "model" else folder
    return f"{run.parent.name}/{run.name}" if run.name.startswith("seed-") else run.name


def training_objective(weight: float) -> Objective:
    regularizers = {"flops": Regularizer(flops, weight)}
    return Objective(InfoNCE(), regularizers, regularizers)


def read_pairs(path: Path, count: int) -> list[tuple[str, str]]:
    """The first ``count`` queries and their first positives.

    Raises:
        SystemExit: a line is no pair, or there are too few.
    """
    pairs = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(islice(file, count), 1):
            try:
                row = parse_record(json.loads(line), TEXTS)
            except (json.JSONDecodeError, RecordError) as error:
                raise SystemExit(f"{path}:{number}: {error}") from error
            pairs.append((row.query, row.positives[0]))
    if len(pairs) < count:
        raise SystemExit(f"{path} has {len(pairs)} pairs; name a longer file or --batch less")
    return pairs


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
        reps = [
            encoder(queries),
            encoder.head(hidden, decoder.weight, decoder.bias, documents),
        ]
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
