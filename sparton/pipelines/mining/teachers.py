"""Teachers: what scores pairs of a query and a document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sparton.errors import refuse_below
from sparton.evaluation import check_model, load_retriever
from sparton.models.encoder import Encoder
from sparton.pipelines.identity import model_identity
from sparton.retrieval.encoding import encode_texts
from sparton.retrieval.index import score_pairs
from sparton.types import SIDES

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

CLASSIFIER = "ForSequenceClassification"
Pairs = Sequence[tuple[str, str]]
Score = Callable[[Pairs], NDArray[np.float32]]


@dataclass(frozen=True)
class CrossEncoderTeacher:
    """Any cross-encoder with one output that sentence-transformers loads.

    Attributes:
        model: folder, or name on the Hugging Face hub.
        activation: apply the activation that the model asks for, often a sigmoid, which flattens
            the margins that distillation learns; by default scores are the logits.
        batch: pairs scored at once.
        length: tokens of a pair; None for what the model says.

    Raises:
        FileNotFoundError: neither a folder nor a name on the hub.
        ArgumentError: a number out of range.
    """

    model: str | Path
    activation: bool = False
    batch: int = 64
    length: int | None = None

    def __post_init__(self) -> None:
        refuse_below(1, batch=self.batch, length=self.length)
        check_model(self.model)

    def identity(self) -> dict[str, object]:
        """What decides the scores."""
        return {
            "teacher": model_identity(self.model),
            "teacher_activation": self.activation,
            "teacher_length": self.length,
        }

    def load(self, device: torch.device) -> Score:
        """
        Raises:
            ValueError: sentence-transformers is missing, or the model cannot be loaded, is no
                trained classifier, or has not exactly one output.
        """
        model = self._load(device)
        activation = None if self.activation else torch.nn.Identity()

        def score(pairs: Pairs) -> NDArray[np.float32]:
            scores = model.predict(
                list(pairs),
                batch_size=self.batch,
                show_progress_bar=False,
                activation_fn=activation,
            )
            return _finite(self.model, np.asarray(scores, np.float32).reshape(len(pairs)))

        return score

    def _load(self, device: torch.device) -> "CrossEncoder":
        name = str(self.model)
        try:
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            raise ValueError(
                f"the teacher {name} needs sentence-transformers ({error}): "
                "pip install 'sentence-transformers>=6.0,<7', or a retriever as teacher"
            ) from error
        try:
            model = CrossEncoder(name, device=str(device), max_length=self.length)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} is no cross-encoder that sentence-transformers can load ({error}): give "
                "its folder or its name on the hub"
            ) from error
        if model.num_labels != 1:
            raise ValueError(
                f"{name} has {model.num_labels} outputs: a teacher must have one, the relevance of "
                "the document"
            )
        stored, built = model.config.architectures or (), type(model.model).__name__
        trained = any(each.endswith(CLASSIFIER) for each in stored)
        if stored and built.endswith(CLASSIFIER) and not trained:
            raise ValueError(
                f"{name} is a {stored[0]}, whose classifier would start at random: give a "
                "cross-encoder, or take it as a retriever (RetrieverTeacher)"
            )
        return model


@dataclass(frozen=True)
class RetrieverTeacher:
    """A model of this project; a score is the MaxSim of the token vectors where the model gives
    any, else the dot product of the sparse vectors.

    Attributes:
        model: loaded, or its folder or hub name.
        precision: see :func:`~sparton.retrieval.encoding.encode_texts`.

    Raises:
        FileNotFoundError: neither a folder nor a name on the hub.
    """

    model: str | Path | Encoder
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if not isinstance(self.model, Encoder):
            check_model(self.model)

    def identity(self) -> dict[str, object]:
        """What decides the scores."""
        return {"teacher": model_identity(self.model), "teacher_precision": self.precision}

    def load(self, device: torch.device) -> Score:
        """
        Raises:
            OSError, ValueError: from :func:`sparton.evaluation.load_retriever`.
        """
        encoder, tokenizer = load_retriever(self.model, device=device)

        def score(pairs: Pairs) -> NDArray[np.float32]:
            sides = [list(dict.fromkeys(texts)) for texts in zip(*pairs)]
            places = [{text: row for row, text in enumerate(texts)} for texts in sides]
            queries, documents = (
                encode_texts(encoder, tokenizer, texts, side, precision=self.precision)
                for side, texts in zip(SIDES, sides)
            )
            rows = np.array([(places[0][query], places[1][document]) for query, document in pairs])
            return _finite(self.model, score_pairs(queries, documents, rows, device))

        return score


def _finite(model: str | Path | Encoder, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(scores).all():
        name = type(model).__name__ if isinstance(model, Encoder) else model
        raise ValueError(f"the teacher {name} gave a score that is not finite: run it in fp32")
    return scores
