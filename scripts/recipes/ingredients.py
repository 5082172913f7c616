"""What a training may have, and which trainings are compared: the whole study as data.

A recipe is a list of ingredients. Each adds sources, or ways in which negatives were mined, or
settings of a training; where two say the same, the later counts.
"""

from collections.abc import Iterable
from typing import NamedTuple

from recipes.pool import DEBIAN

# Each kind's experiment, and where its losses are.
EXPERIMENTS = {
    "splade": "in_domain",
    "inference-free": "inference_free_in_domain",
    "joint": "joint_in_domain",
    "colbert": "colbert_in_domain",
}
LOSSES = {"joint": ("loss.sparse", "loss.tokens")}
SPARSE = ("splade", "inference-free", "joint")
TOKENS = ("colbert", "joint")  # kinds with token vectors
PARENT, BM25, LATE = (1, 0, 0), (0, 1, 0), (0, 0, 1)  # weights of the teachers

Teachers = tuple[float, float, float]


class Ingredient(NamedTuple):
    """
    Attributes:
        sources: of pairs, beside SQuAD and ACL.
        collection: "target" for crops of the collections that are tested, which is no longer
            zero-shot.
        miners: whose negatives there are, seven of each query.
        teachers: weights of all-MiniLM-L6-v2, BM25 and the late-interaction model.
        home: the same for SQuAD and ACL, which the late-interaction model has learned from.
        start: the language model that models with terms start from.
        settings: of every kind; ``{output}`` is the study's folder, ``{terms}`` and ``{tokens}``
            are where the settings of a head's two halves are.
        sparse: settings of the kinds with terms.
        loss: settings below each of a kind's losses.
        kinds: that it is for; empty for all.
    """

    sources: tuple[str, ...] = ()
    collection: str = ""
    miners: tuple[str, ...] = ()
    teachers: Teachers | None = None
    home: Teachers | None = None
    start: str = ""
    settings: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    loss: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def and_then(self, other: "Ingredient") -> "Ingredient":
        return Ingredient(
            sources=(*self.sources, *other.sources),
            collection=other.collection or self.collection,
            miners=(*self.miners, *other.miners),
            teachers=other.teachers or self.teachers,
            home=other.home or self.home,
            start=other.start or self.start,
            settings=(*self.settings, *other.settings),
            sparse=(*self.sparse, *other.sparse),
            loss=(*self.loss, *other.loss),
        )


def flops(query: float, document: float) -> tuple[str, ...]:
    """Weights of the regularizers; queries that are looked up have none."""
    return (
        f"query_regularizer.flops.weight={query}",
        f"document_regularizer.flops.weight={document}",
    )


# A softmax of 20 times a cosine is what all-MiniLM-L6-v2 was trained with; a query's scores, which
# are brought to [0, 1], span about half of a cosine's range.
TEMPERATURE = "losses.kl_divergence.teacher_temperature=0.1"
WHOLE_QUERIES = "query_length=128"
# 1,024 documents in a step, half of them at a time: 9 GiB, so that several trainings share a GPU.
FEWER = ("batch=128", "steps=1200", "micro_batch=64")

INGREDIENTS = {
    "crops": Ingredient(sources=("crops",)),
    "debian": Ingredient(sources=DEBIAN),
    "target": Ingredient(collection="target"),
    "mined": Ingredient(miners=("bm25",), settings=FEWER),
    "two-miners": Ingredient(miners=("bm25", "parent"), settings=FEWER),
    "parent": Ingredient(teachers=PARENT, loss=(TEMPERATURE,)),
    "bm25": Ingredient(teachers=BM25, loss=(TEMPERATURE,)),
    "late": Ingredient(teachers=LATE, loss=(TEMPERATURE,)),
    "parent-late": Ingredient(teachers=(1, 0, 1), loss=(TEMPERATURE,)),
    "parent-bm25": Ingredient(teachers=(1, 1, 0), loss=(TEMPERATURE,)),
    "parent-most": Ingredient(teachers=(2, 1, 0), loss=(TEMPERATURE,)),
    "three-teachers": Ingredient(teachers=(2, 1, 1), loss=(TEMPERATURE,)),
    "late-at-home": Ingredient(home=LATE),
    "little-infonce": Ingredient(loss=("weights.infonce=0.2",)),
    "much-infonce": Ingredient(loss=("weights.infonce=1.0",)),
    "sharper": Ingredient(loss=("losses.kl_divergence.teacher_temperature=0.05",)),
    "softer": Ingredient(loss=("losses.kl_divergence.teacher_temperature=0.2",)),
    "ema": Ingredient(settings=("averaging=ema", "averaging.decay=0.99")),
    "frozen": Ingredient(start="frozen", kinds=SPARSE),
    "wide": Ingredient(start="wide", kinds=SPARSE),
    "medium": Ingredient(settings=("optimizer.lr=1e-4",)),
    "slow": Ingredient(settings=("optimizer.lr=5e-5",)),
    "slower": Ingredient(settings=("optimizer.lr=2e-5",)),
    "fast": Ingredient(settings=("optimizer.lr=4e-4",)),
    "long": Ingredient(settings=("steps=2400",)),
    "sparser": Ingredient(sparse=flops(3e-3, 3e-3), kinds=SPARSE),
    "denser": Ingredient(sparse=flops(3e-4, 3e-4), kinds=SPARSE),
    "short-queries": Ingredient(sparse=flops(1e-2, 1e-3), kinds=SPARSE),
    "token-topk": Ingredient(sparse=("{terms}token_topk=12",), kinds=SPARSE),
    "no-special-terms": Ingredient(sparse=("{terms}special_terms=false",), kinds=SPARSE),
    "homogeneous": Ingredient(settings=("data.homogeneous=true",)),
    "roots": Ingredient(settings=("data.alpha=0.5",)),
    "own-idf": Ingredient(
        settings=("query_encoder.weights={output}/idf-pool.json", "query_encoder.missing=10"),
        kinds=("inference-free",),
    ),
    "learned-queries": Ingredient(
        settings=("query_encoder.frozen=false",), kinds=("inference-free",)
    ),
    "full-width": Ingredient(settings=("{tokens}width=384",), kinds=TOKENS),
    "no-expansion": Ingredient(settings=("{tokens}query_expansion=false",), kinds=TOKENS),
    # No token that all-MiniLM-L6-v2 was not trained with.
    "plain": Ingredient(
        settings=(
            "{tokens}query_expansion=false",
            "{tokens}query_marker=''",
            "{tokens}document_marker=''",
        ),
        kinds=TOKENS,
    ),
    # Queries whose weights are looked up cannot make their scores smaller: idf times what a
    # document's terms weigh is a softmax that is 1 or 0 from the first steps on.
    "warm": Ingredient(settings=("loss.temperature=2",)),
    "warmer": Ingredient(settings=("loss.temperature=4",)),
    "warmest": Ingredient(settings=("loss.temperature=8",)),
    "warmer-teacher": Ingredient(
        loss=("losses.kl_divergence.temperature=4", "losses.infonce.temperature=4")
    ),
    "two-logarithms": Ingredient(sparse=("{terms}activation=log1p_relu",), kinds=SPARSE),
    "rare": Ingredient(settings=("query_encoder.missing=7",), kinds=("inference-free",)),
    "fp8-head": Ingredient(settings=("head.fp8=true",), kinds=("splade",)),
    "fp8-layers": Ingredient(settings=("precision=fp8",)),
    # Of medline's queries every third has more than 32 tokens, and every sixth more than 64.
    "whole-queries": Ingredient(settings=(WHOLE_QUERIES,)),
}

TEXTS = ("crops", "debian")
TAUGHT = ("two-miners", "parent-most")
DISTILLED = (*TEXTS, *TAUGHT)
# What each recipe has; its name says it where it has one ingredient alone.
ABLATION = {
    "base": (),
    "crops": ("crops",),
    "debian": ("debian",),
    "texts": TEXTS,
    "ema": ("ema",),
    "frozen": ("frozen",),
    "wide": ("wide",),
    "sparser": ("sparser",),
    "denser": ("denser",),
    "slow": ("slow",),
    "fast": ("fast",),
    "token-topk": ("token-topk",),
    "no-special-terms": ("no-special-terms",),
    "mined": ("mined",),
    "two-miners": ("two-miners",),
    "parent": ("two-miners", "parent"),
    "late": ("two-miners", "late"),
    "parent-late": ("two-miners", "parent-late"),
    "parent-bm25": ("two-miners", "parent-bm25"),
    "distilled": DISTILLED,
    "distilled-parent": (*TEXTS, "two-miners", "parent"),
    "distilled-kl": (*DISTILLED, "little-infonce"),
    "best": (*DISTILLED, "little-infonce", "frozen", "slow", "ema"),
    "best-slower": (*DISTILLED, "little-infonce", "frozen", "slower", "ema"),
    "best-fast": (*DISTILLED, "little-infonce", "frozen", "ema"),
    "best-adapted": (*DISTILLED, "little-infonce", "slow", "ema"),
    "best-wide": (*DISTILLED, "little-infonce", "wide", "slow", "ema"),
    "best-three": (*DISTILLED, "three-teachers", "little-infonce", "frozen", "slow", "ema"),
    "best-even": (*DISTILLED, "parent-bm25", "little-infonce", "frozen", "slow", "ema"),
    "best-sharper": (*DISTILLED, "sharper", "little-infonce", "frozen", "slow", "ema"),
    "best-softer": (*DISTILLED, "softer", "little-infonce", "frozen", "slow", "ema"),
    "best-sparser": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "sparser"),
    "best-short": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "short-queries"),
    "best-topk": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "token-topk"),
    "best-roots": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "roots"),
    "best-homogeneous": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "homogeneous"),
    "best-long": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "long"),
    "best-home": (*DISTILLED, "late-at-home", "little-infonce", "frozen", "slow", "ema"),
    "best-home-long": (
        *DISTILLED,
        "late-at-home",
        "little-infonce",
        "frozen",
        "medium",
        "ema",
        "long",
    ),
    "best-target": (*DISTILLED, "little-infonce", "frozen", "slow", "ema", "target"),
}
_BEST = ABLATION["best"]
_SOFT = (*TAUGHT, "warmer-teacher", "whole-queries")
# Of each kind, what is trained, in the order of importance.
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "splade": ABLATION
    | {
        "fp8-head": ("fp8-head",),
        "fp8-layers": ("fp8-layers",),
        "best-whole-long": (*ABLATION["best-long"], "whole-queries"),
    },
    "colbert": {
        name: ABLATION[name]
        for name in ("base", "best", "best-home", "best-home-long", "slow", "texts", "distilled")
    }
    | {
        "best-parent": (*_BEST, "parent"),
        "best-slower": ABLATION["best-slower"],
        "best-wide": (*_BEST, "full-width"),
        "best-wide-long": (*ABLATION["best-home-long"], "full-width"),
        "best-no-expansion": (*_BEST, "no-expansion"),
        "best-plain": (*_BEST, "plain"),
        "best-plain-wide": (*_BEST, "plain", "full-width"),
        "best-whole": (*_BEST, "plain", "full-width", "whole-queries"),
        "best-plain-wide-slower": (*ABLATION["best-slower"], "plain", "full-width"),
        "best-long": ABLATION["best-long"],
        "best-whole-long": (*ABLATION["best-long"], "plain", "full-width", "whole-queries"),
        "plain": ("plain",),
        "best-target": ABLATION["best-target"],
    },
    "inference-free": {name: ABLATION[name] for name in ("base", "texts", "distilled")}
    | {
        "own-idf": ("own-idf",),
        "whole": ("whole-queries",),
        "whole-texts": (*TEXTS, "whole-queries"),
        "whole-learned": ("learned-queries", "whole-queries"),
        "whole-learned-long": ("learned-queries", "whole-queries", "long"),
        "whole-learned-denser": ("learned-queries", "whole-queries", "denser"),
        "whole-learned-frozen": ("learned-queries", "whole-queries", "frozen", "ema"),
        "whole-warm": ("whole-queries", "warm"),
        "whole-warmer": ("whole-queries", "warmer"),
        "whole-warmest": ("whole-queries", "warmest"),
        "whole-warmer-ema": ("whole-queries", "warmer", "ema"),
        "whole-warmer-long": ("whole-queries", "warmer", "long"),
        "whole-warmer-denser": ("whole-queries", "warmer", "denser"),
        "whole-two-logarithms": ("whole-queries", "two-logarithms"),
        "whole-two-logarithms-denser": ("whole-queries", "two-logarithms", "denser"),
        "whole-distilled-warmer": (*TEXTS, *_SOFT),
        "whole-distilled-warmer-long": (*TEXTS, *_SOFT, "long"),
        "whole-distilled-warmer-learned": (*TEXTS, *_SOFT, "learned-queries"),
        "whole-home-warmer": _SOFT,
        "whole-crops-warmer": ("crops", *_SOFT),
        "whole-crops-warmer-long": ("crops", *_SOFT, "long"),
        "whole-rare": ("whole-queries", "rare"),
        "whole-mined": (*TEXTS, "two-miners", "whole-queries"),
        "best": (*_BEST, "own-idf"),
        "best-learned": (*_BEST, "own-idf", "learned-queries"),
        "best-fast": (*ABLATION["best-fast"], "own-idf"),
        "best-fast-long": (*ABLATION["best-fast"], "whole-queries", "long"),
        "best-pairs-long": (*ABLATION["best-fast"], "much-infonce", "whole-queries", "long"),
        "best-home-long": (*ABLATION["best-home-long"], "own-idf"),
        "best-target": (*ABLATION["best-target"], "own-idf"),
    },
    "joint": {
        name: ABLATION[name]
        for name in ("base", "best", "best-home-long", "best-fast", "best-target")
    }
    | {"best-whole-long": (*ABLATION["best-long"], "plain", "full-width", "whole-queries")},
}
# Trained with every seed, and then averaged.
CHOSEN = {
    "splade": ("base", "fp8-head", "fp8-layers", "best-whole-long"),
    "colbert": ("base", "best-plain-wide", "best-whole"),
    "inference-free": (
        "base",
        "best",
        "whole-warmer",
        "whole-distilled-warmer",
        "whole-crops-warmer",
    ),
    "joint": ("base", "best-whole-long"),
}
# Means of the weights of models of several recipes, by their own name.
MIXED: dict[str, dict[str, tuple[str, ...]]] = {
    "splade": {"mixed": ("best-long", "best-home-long")},
    "colbert": {"mixed": ("best", "best-home-long")},
}


def recipe(kind: str, names: Iterable[str]) -> Ingredient:
    """All ingredients of these names together, without those that are for other kinds."""
    whole = Ingredient()
    for name in names:
        found = INGREDIENTS[name]
        if not found.kinds or kind in found.kinds:
            whole = whole.and_then(found)
    return whole
