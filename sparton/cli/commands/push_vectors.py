"""Put encoded documents into a search engine, or write the files that do so.

    sparton push-vectors DOCS --to opensearch --output FOLDER
    sparton push-vectors DOCS --to opensearch --url http://localhost:9200
    sparton push-vectors DOCS --to opensearch --query 'where is the cat?'

DOCS is a folder of sparton encode. See docs/guides/vectors.md for what each engine keeps of scores,
and for the environment variables that authenticate.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparton.cli.commands.flags import check_query, command_parser, flags_named

if TYPE_CHECKING:
    from sparton.datasets.tokenization import PackedTokenizer
    from sparton.encoded import EncodedTexts
    from sparton.engines import Engine
    from sparton.models.encoder import Encoder

INTERRUPTED = "the same command finishes"


def main(arguments: Sequence[str]) -> None:
    """``sparton push-vectors``."""
    parsed = _parser().parse_args(arguments)

    from sparton.arguments import refuse_ignored
    from sparton.encoded import open_encoded
    from sparton.engines import engine_for, send, write_files

    with flags_named(names="--terms"):
        check_query(parsed.query, parsed.k)
        if parsed.query is None:
            refuse_ignored("a push without --query", k=parsed.k)
            if parsed.terms == "numbers":
                refuse_ignored("a push of numbers of terms", model=parsed.model)
        texts = open_encoded(parsed.documents)
        make = partial(engine_for, parsed.to, texts.facts.settings, parsed.index, kind=parsed.kind)
        engine, model = make(), None
        if parsed.terms == "tokens" or parsed.query is not None:
            model = _load(texts, parsed.model)
        if parsed.terms == "tokens" and model is not None:
            from sparton.pipelines.export import term_names

            engine = make(names=term_names(model[0]))
        if model is not None and parsed.query is not None:
            _show_query(engine, *model, parsed.query, 10 if parsed.k is None else parsed.k)
            return
        if parsed.url is not None:
            pushed, where = send(engine, texts, parsed.url), f"sent to {parsed.url}"
        else:
            pushed, where = write_files(engine, texts, parsed.output), f"written to {parsed.output}"
    empty = f", {pushed.empty:,} without vectors left out" if pushed.empty else ""
    print(f"{pushed.documents:,} documents{empty}, {where}")
    for kind in sorted(engine.kinds):
        print(f"{kind}, what {engine.name} loses: {engine.loses[kind]}")


def _load(texts: "EncodedTexts", model: str | None) -> "tuple[Encoder, PackedTokenizer]":
    """The model that has encoded the texts."""
    import transformers

    from sparton.evaluation import load_retriever

    transformers.utils.logging.disable_progress_bar()
    encoder, tokenizer = load_retriever(model or texts.facts.name)
    texts.check_model(encoder)
    return encoder, tokenizer


def _show_query(
    engine: "Engine", encoder: "Encoder", tokenizer: "PackedTokenizer", query: str, k: int
) -> None:
    from sparton.retrieval.encoding import encode_texts

    encoded = encode_texts(encoder, tokenizer, [query], "query", kinds=engine.kinds)
    (body,) = engine.query(encoded, k)
    print(json.dumps(body, ensure_ascii=False))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("push-vectors", __doc__)
    parser.add_argument("documents", type=Path, help="folder of encoded texts")
    parser.add_argument(
        "--to", required=True, help="opensearch, elasticsearch, vespa, qdrant or milvus"
    )
    parser.add_argument("--index", default="documents", help="its name there; default: documents")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, metavar="FOLDER", help="write files")
    where.add_argument("--url", help="make the index and send documents")
    where.add_argument("--query", metavar="TEXT", help="show the body of the request that searches")
    parser.add_argument("--k", type=int, help="results of the query; default: 10")
    parser.add_argument(
        "--kind", choices=("sparse", "tokens"), help="default: all vectors that there are"
    )
    parser.add_argument(
        "--terms", choices=("numbers", "tokens"), default="numbers",
        help="what terms are called; default: numbers",
    )  # fmt: skip
    parser.add_argument("--model", help="which encoded the texts; default: where it was then")
    return parser
