"""The card of a saved model: ``README.md`` with the front matter that the Hugging Face hub reads.

V terms, E width of a token's vector.
"""

from pathlib import Path
from typing import NamedTuple

from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.backbone import Backbone
from sparton.models.causal_lm import is_causal_lm
from sparton.models.colbert import ColbertEncoder
from sparton.models.csr import AutoencoderEncoder
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders.files import Lengths
from sparton.models.joint import JointEncoder
from sparton.models.origin import CARD, Origin
from sparton.models.splade import SpladeEncoder
from sparton.types import SIDES

# Their folders have a SpladePooling, which knows no include_prompt.
POOLED_BY_SPLADE = (SpladeEncoder, AsymmetricEncoder, JointEncoder)
RESULTS, RESULTS_END = "<!-- results -->", "<!-- end of results -->"


class Kind(NamedTuple):
    """How a card speaks of a kind of model.

    Attributes:
        title: what such a model is.
        loader: the class of sentence-transformers that reads its folder.
        tags: by which it is found on the hub.
    """

    title: str
    loader: str
    tags: tuple[str, ...]


KINDS: dict[type[Encoder], Kind] = {
    SpladeEncoder: Kind("SPLADE retriever", "SparseEncoder", ("sparse-encoder", "splade")),
    AsymmetricEncoder: Kind(
        "SPLADE retriever with another encoder of queries",
        "SparseEncoder",
        ("sparse-encoder", "splade", "asymmetric"),
    ),
    AutoencoderEncoder: Kind(
        "contrastive sparse retriever (CSR)", "SparseEncoder", ("sparse-encoder", "csr")
    ),
    JointEncoder: Kind(
        "SPLADE and late-interaction retriever in one",
        "SparseEncoder",
        ("sparse-encoder", "splade", "late-interaction", "colbert"),
    ),
    ColbertEncoder: Kind(
        "late-interaction (ColBERT) retriever",
        "MultiVectorEncoder",
        ("multi-vector", "late-interaction", "colbert"),
    ),
    DenseEncoder: Kind("dense retriever", "SentenceTransformer", ("sentence-similarity",)),
}


def write_card(encoder: Encoder, folder: Path, name: str, lengths: Lengths) -> None:
    """Write the card of an encoder into its folder.

    Args:
        name: what the examples load: the folder's own name, until it has one on the hub.
    """
    kind = KINDS[type(encoder)]
    front = _front_matter(encoder.origin, kind, name)
    (folder / CARD).write_text(f"---\n{front}---\n\n{_body(encoder, kind, name, lengths)}")


def _front_matter(origin: Origin, kind: Kind, name: str) -> str:
    from huggingface_hub import ModelCardData

    return (
        ModelCardData(
            license=origin.license,
            base_model=origin.base_model,
            datasets=list(origin.datasets) or None,
            library_name="sentence-transformers",
            pipeline_tag="feature-extraction",
            tags=["sentence-transformers", "sparton", "retrieval", *kind.tags],
            model_name=name,
        ).to_yaml()
        + "\n"
    )


def _body(encoder: Encoder, kind: Kind, name: str, lengths: Lengths) -> str:
    rows = "\n".join(f"| {label} | {value} |" for label, value in _facts(encoder, lengths))
    return f"""# {name}

A {kind.title}, trained with [sparton](https://pypi.org/project/sparton/).

| | |
| --- | --- |
{rows}

## Search

```python
import sparton

model = sparton.load("{name}")
documents = ["Paris is the capital of France.", "A cat sleeps on the sofa."]
index = model.index(documents)
for hit in index.search(["Where is the cat?"], k=2)[0]:
    print(f"{{hit.score:.2f}}", documents[hit.id])
```

{_elsewhere(encoder)}

```python
from sentence_transformers import {kind.loader}

model = {_call(encoder, kind, name)}
queries = model.encode_query(["Where is the cat?"])
documents = model.encode_document(["Paris is the capital of France.", "A cat sleeps on the sofa."])
print(model.similarity(queries, documents))
```

## Results

{RESULTS}
Not measured yet: `sparton evaluate model={name}`, then `sparton card`.
{RESULTS_END}

## Terms

{_terms(encoder.origin)}
"""


def _elsewhere(encoder: Encoder) -> str:
    """What sentence-transformers needs to load the folder."""
    backbones = _backbones(encoder)
    if any(each.logit_bias is not None for each in backbones):
        return (
            "The folder also loads in sentence-transformers 6.2 and later, where sparton is "
            "installed: its logits have a bias, for which the model's architecture has no place."
        )
    if any(is_causal_lm(each.model.config) for each in backbones):
        return (
            "The folder also loads in sentence-transformers 6.2 and later; those before may read "
            "other logits without a word."
        )
    return "The folder also loads in sentence-transformers:"


def _call(encoder: Encoder, kind: Kind, name: str) -> str:
    has_bias = any(each.logit_bias is not None for each in _backbones(encoder))
    return f'{kind.loader}("{name}"{", trust_remote_code=True" if has_bias else ""})'


def _backbones(encoder: Encoder) -> list[Backbone]:
    return [each for each in encoder.modules() if isinstance(each, Backbone)]


def _facts(encoder: Encoder, lengths: Lengths) -> list[tuple[str, str]]:
    base = encoder.origin.base_model
    facts = [("starts from", base or "random weights, or weights without a name")]
    if encoder.origin.datasets:
        facts.append(("trained on", ", ".join(encoder.origin.datasets)))
    facts.append(("longest query and document", f"{lengths.query} and {lengths.document} tokens"))
    for side in SIDES:
        if prompt := getattr(encoder.markup, f"{side}_prompt"):
            facts.append((f"before a {side}", f"`{prompt}`"))
    if not encoder.markup.include_prompt and isinstance(encoder, POOLED_BY_SPLADE):
        facts.append(("pooled", "what follows a prompt; sentence-transformers pools all tokens"))
    if encoder.markup.echo is not None:
        facts.append(
            (
                "read twice",
                f"with `{encoder.markup.echo}` between, and the second copy pooled; "
                "sentence-transformers reads texts once, and scores other than here",
            )
        )
    parameters = sum(each.numel() for each in encoder.parameters())
    return [*facts, ("parameters", f"{parameters:,}")]


def _terms(origin: Origin) -> str:
    if origin.license is None:
        return (
            "No licence is known of the weights that this model was trained from. Set `license` at "
            "the top of this file to the one under which you publish it."
        )
    source = origin.base_model or "the model that it was trained from"
    text = f"The weights stand under {origin.license}, the terms of {source}."
    if origin.is_non_commercial:
        text += " Commercial use is not allowed."
    return text
