"""Write late-interaction models of all-MiniLM-L6-v2 that were never trained: what it knows of it by
itself, and what a head's settings change in that.

    python scripts/recipes/untrained.py --output runs/zero_shot/untrained
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from sparton.models.backbones import minilm
from sparton.models.colbert import ColbertEncoder, ColbertHead
from sparton.models.folders import save_encoder
from sparton.writing import replacing_folder

PLAIN: dict[str, Any] = {
    "width": 384, "query_expansion": False, "query_marker": "", "document_marker": "",
}  # fmt: skip
# By name: what of the plain head of full width is otherwise.
HEADS: dict[str, dict[str, Any]] = {
    "plain-wide": {},
    "plain": {"width": 128},
    "plain-random": {"width": 128},  # in place of orthonormal rows
    "markers": {"query_marker": "[Q] ", "document_marker": "[D] "},
    "expansion": {"query_expansion": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the models")
    arguments = parser.parse_args()
    with replacing_folder(arguments.output) as fresh:
        for name, settings in HEADS.items():
            torch.manual_seed(0)
            encoder = ColbertEncoder(minilm(), ColbertHead(**PLAIN | settings))
            if name == "plain-random":
                encoder.projection.reset_parameters()
            save_encoder(encoder, fresh / name, query_length=64, document_length=256)


if __name__ == "__main__":
    main()
