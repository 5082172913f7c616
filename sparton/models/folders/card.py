"""The card of a saved model: ``README.md`` with the front matter that the Hugging Face hub reads.

V terms, E width of a token's vector.
"""

from pathlib import Path
from typing import NamedTuple

from sparton.models.asymmetric import AsymmetricEncoder
from sparton.models.backbone import Backbone
from sparton.models.body import EncoderBody
from sparton.models.causal_lm import is_causal_lm
from sparton.models.colbert import ColbertEncoder
from sparton.models.csr import AutoencoderEncoder
from sparton.models.dense import DenseEncoder
from sparton.models.encoder import Encoder
from sparton.models.folders.files import Lengths
from sparton.models.folders.splade import OWN_POOLING, pooling_type
from sparton.models.heads import SpladeHead
from sparton.models.joint import JointEncoder
from sparton.models.origin import CARD, Origin
from sparton.models.repository import Source
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
    content = f"---\n{front}---\n\n{_body(encoder, kind, name, lengths)}"
    (folder / CARD).write_text(content, encoding="utf-8")


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
    own = any(pooling_type(each) == OWN_POOLING for each in _splade_heads(encoder)) or any(
        each.logit_bias is not None for each in _backbones(encoder)
    )
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

{_also(encoder)} in sentence-transformers{", where sparton is installed" if own else ""}:

```python
from sentence_transformers import {kind.loader}

model = {kind.loader}("{name}"{", trust_remote_code=True" if own else ""})
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


def _also(encoder: Encoder) -> str:
    if _base_of_adapters(encoder) is None:
        return "The folder also loads"
    return "Beside peft, and unless its attention is not that of its base, the folder also loads"


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
    if any(is_causal_lm(each.model.config) for each in _backbones(encoder)):
        facts.append(("logits", "of all tokens: sentence-transformers reads them from 6.2 on"))
    for head in _splade_heads(encoder):
        if head.token_topk is not None:
            facts.append(("terms of each token", f"the {head.token_topk} largest"))
        if head.fold is not None:
            facts.append(("terms that count as one", f"{head.fold.num_groups:,} groups of them"))
    parameters = sum(p.numel() for name, p in encoder.named_parameters() if ".lora_" not in name)
    facts.append(("parameters", f"{parameters:,}"))
    if adapted := _base_of_adapters(encoder):
        facts.append(("holds", f"low-rank adapters alone; loading them reads `{adapted}`, too"))
        facts.append(("read by", "transformers from 5.17 on; with 5.3 adapters are random"))
    return facts


def _base_of_adapters(encoder: Encoder) -> Source | None:
    """The model without which a folder of adapters is none; None for complete folders."""
    bodies = (part for part in encoder.modules() if isinstance(part, EncoderBody))
    return next((each.base for each in bodies if each.saves_adapters_alone), None)


def _backbones(encoder: Encoder) -> list[Backbone]:
    """Those with a decoder, of which logits are read."""
    return [each for each in encoder.modules() if isinstance(each, Backbone)]


def _splade_heads(encoder: Encoder) -> list[SpladeHead]:
    """The SPLADE heads of an encoder."""
    return [each for each in encoder.modules() if isinstance(each, SpladeHead)]


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
