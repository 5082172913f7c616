"""Teachers: functions from pairs of a query and a document to one score each."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hard_negatives.miners import Encoding
from sparton.evaluation import load_retriever
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.index import score_pairs
from sparton.types import SIDES

CLASSIFIER = "ForSequenceClassification"
Pairs = Sequence[tuple[str, str]]
Teacher = Callable[[Pairs], NDArray[np.float32]]


def cross_encoder(
    name: str, *, device: str, batch: int, max_length: int | None, logits: bool
) -> Teacher:
    """Any cross-encoder with one output that sentence-transformers loads.

    Args:
        name: folder, or name on the Hugging Face hub.
        device: where it runs.
        batch: pairs scored at once.
        max_length: tokens of a pair; None for what the model says.
        logits: leave out the activation that the model asks for, often a sigmoid, which would
            flatten the margins that distillation learns.

    Raises:
        ValueError: sentence-transformers is missing, or the model cannot be loaded, is no trained
            classifier, or has not exactly one output.
    """
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        raise ValueError(
            f"--teacher {name} needs sentence-transformers ({error}): "
            "pip install 'sentence-transformers>=6.0,<7', or take a model of this project with "
            "--teacher-kind retriever"
        ) from error
    from torch import nn

    try:
        model = CrossEncoder(name, device=device, max_length=max_length)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--teacher {name} is no cross-encoder that sentence-transformers can load ({error}): "
            "give its folder or its name on the hub"
        ) from error
    if model.num_labels != 1:
        raise ValueError(
            f"--teacher {name} has {model.num_labels} outputs: a teacher must have one, the "
            "relevance of the document"
        )
    stored = model.config.architectures or ()
    built = type(model.model).__name__
    if (
        stored
        and built.endswith(CLASSIFIER)
        and not any(each.endswith(CLASSIFIER) for each in stored)
    ):
        raise ValueError(
            f"--teacher {name} is a {stored[0]}, whose classifier would start at random: give a "
            "cross-encoder, or --teacher-kind retriever for a model of this project"
        )
    activation = nn.Identity() if logits else None

    def score(pairs: Pairs) -> NDArray[np.float32]:
        scores = model.predict(
            list(pairs), batch_size=batch, show_progress_bar=False, activation_fn=activation
        )
        return _finite(name, np.asarray(scores, np.float32).reshape(len(pairs)))

    return score


def retriever(name: str, encoding: Encoding) -> Teacher:
    """A model of this project; a score is the MaxSim of the token vectors where the model gives
    any, else the dot product of the sparse vectors.

    Raises:
        FileNotFoundError, OSError, ValueError: from :func:`sparton.evaluation.load_retriever`.
    """
    encoder, tokenizer = load_retriever(
        name, encoding.query_length, encoding.document_length, device=encoding.device
    )

    def score(pairs: Pairs) -> NDArray[np.float32]:
        sides = [list(dict.fromkeys(texts)) for texts in zip(*pairs)]
        places = [{text: row for row, text in enumerate(texts)} for texts in sides]
        queries, documents = (
            encode_texts(encoder, tokenizer, texts, side, precision=encoding.precision)
            for side, texts in zip(SIDES, sides)
        )
        rows = np.array([(places[0][query], places[1][document]) for query, document in pairs])
        return _finite(name, score_pairs(queries, documents, rows, encoding.device))

    return score


def _finite(name: str, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(scores).all():
        raise ValueError(f"--teacher {name} gave a score that is not finite: run it in fp32")
    return scores
