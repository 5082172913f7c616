"""Give MiniLM a masked-language-modelling head by training on the documents of BEIR-layout folders,
or adapt another language model to them.

    sparton adapt data/squad data/acl_title_abstract --output models/minilm-mlm
    sparton train backbone=bert_base backbone.name=models/minilm-mlm

    sparton adapt data/squad --objective mntp --backbone NAME \\
        --output models/mntp
    sparton train backbone=causal_lm backbone.name=models/mntp

    sparton adapt data/squad --objective mntp --backbone NAME \\
        --lora '{rank: 16, alpha: 32}' --output models/mntp

Only corpus files are read, no queries and no judgments. Language modelling leaves the level of the
logits open (softmax does not see a constant), while SPLADE cuts them at zero; the decoder's bias is
therefore shifted at the end so that held-out texts have --active-terms terms on average.
The folder <output>.run has the log; from its checkpoints the same command goes on where it was
stopped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sparton.arguments import refuse_ignored
from sparton.cli.commands.flags import command_parser, flags_named, given
from sparton.cli.commands.train import set_environment

INTERRUPTED = (
    "the same command goes on from the last checkpoint, or begins anew where there is none yet "
    "(--checkpoint-every)"
)


def main(arguments: Sequence[str]) -> None:
    """``sparton adapt``."""
    set_environment()
    parser = command_parser("adapt", __doc__)
    parser.add_argument(
        "corpora", nargs="+", type=Path, help="folders with corpus.jsonl[.gz], or such files"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--backbone", help="start from this language model instead of MiniLM")
    parser.add_argument(
        "--objective",
        default="mlm",
        help="mlm, the default: of a masked language model; of a causal one mntp, which makes it "
        "bidirectional, or clm",
    )
    parser.add_argument("--steps", type=int, default=3000, help="default: %(default)s")
    parser.add_argument(
        "--batch-tokens", type=int, default=65536, help="of a step; default: %(default)s"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=256,
        help="longest text in tokens, or the positions of the model; default: %(default)s",
    )
    parser.add_argument("--lr", type=float, help="of the pretrained weights; default: 2e-4")
    parser.add_argument(
        "--head-lr",
        type=float,
        default=1e-3,
        help="of the new head, with mlm; default: %(default)s",
    )
    parser.add_argument(
        "--frozen", action="store_true", help="with mlm, the head learns alone; faster"
    )
    parser.add_argument(
        "--relu-weight",
        type=float,
        default=0.0,
        help="of a loss that readies logits for SPLADE; default: 0",
    )
    parser.add_argument(
        "--warmup", type=float, default=0.06, help="share of the steps; default: %(default)s"
    )
    parser.add_argument(
        "--active-terms", type=int, default=400, help="of a text; default: %(default)s"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=500, help="steps; default: %(default)s"
    )
    parser.add_argument(
        "--lora",
        type=_settings,
        help="adapters learn in the place of the weights, all at --lr; settings as those of "
        "backbone.lora, such as '{rank: 16, alpha: 32, save: adapter}'",
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="for less memory")
    parser.add_argument("--compile", action="store_true", help="for more speed on a GPU")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parsed = parser.parse_args(arguments)

    from sparton.datasets.collection import beir_texts
    from sparton.pipelines.masked_language import Plan

    with flags_named():
        if parsed.frozen:
            again = parsed.gradient_checkpointing or None
            refuse_ignored("--frozen", lr=parsed.lr, gradient_checkpointing=again)
        plan = Plan(**given(parsed, [*Plan.__annotations__]))
        settings = {name: value for name, value in vars(parsed).items() if not hasattr(plan, name)}
        texts = beir_texts(settings.pop("corpora"), or_files=True)

        # Only now, as it takes seconds: what is wrong so far has been said.
        import transformers

        from sparton.pipelines import adapt_lm

        transformers.utils.logging.disable_progress_bar()
        adapted = adapt_lm(texts, plan=plan, **settings)
    print(f"{adapted.texts:,} texts")
    for when, (loss, accuracy) in (("before", adapted.before), ("after", adapted.after)):
        print(f"{when}: held-out loss {loss:.3f}, {accuracy:.1%} of predicted tokens right")
    print(f"decoder bias shifted by {adapted.shift:+.2f}: {plan.active_terms} active terms")
    print(f"written to {settings['output']}")


def _settings(text: str) -> Any:
    """What a flag has in YAML, in which overrides of ``sparton train`` are written, too."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not written like '{{rank: 16, alpha: 32}}'"
        ) from error
