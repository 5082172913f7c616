"""Vectors for search engines: what creates an index there, what fills it, and what searches it."""

from collections.abc import Sequence

from sparton.arguments import refuse_other
from sparton.encoded.facts import Settings
from sparton.engines.elasticsearch import Elasticsearch
from sparton.engines.engine import Engine
from sparton.engines.files import Pushed, write_files
from sparton.engines.milvus import Milvus
from sparton.engines.opensearch import OpenSearch
from sparton.engines.qdrant import Qdrant
from sparton.engines.sending import send
from sparton.engines.vespa import Vespa
from sparton.types import Kind

__all__ = ["ENGINES", "Engine", "Pushed", "engine_for", "send", "write_files"]

ENGINES: dict[str, type[Engine]] = {
    each.name: each for each in (OpenSearch, Elasticsearch, Vespa, Qdrant, Milvus)
}


def engine_for(
    to: str,
    settings: Settings,
    index: str = "documents",
    *,
    kind: Kind | None = None,
    names: Sequence[str] | None = None,
) -> Engine:
    """An index of a search engine that can hold texts which were encoded so.

    Args:
        to: name of the engine.
        settings: how documents were encoded, as ``open_encoded(folder).facts.settings`` says.
        index: its name there.
        kind: the half to push of documents that have both; None for all.
        names: of the terms, in the place of their numbers.

    Raises:
        ArgumentError: there is no such engine, or it cannot do that.
    """
    refuse_other(ENGINES, to=to)
    if settings.side != "document":
        raise ValueError("the texts were encoded as queries: push texts that are documents")
    return ENGINES[to](index, settings, kind=kind, names=names)
