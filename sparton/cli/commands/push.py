"""``sparton push``: a saved model to the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from sparton.cli.commands.flags import command_parser, flags_named


def main(arguments: Sequence[str]) -> None:
    """Upload a saved model with its card to the Hugging Face hub."""
    parser = command_parser("push", main.__doc__)
    parser.add_argument("model", type=Path, help="folder of a saved model")
    parser.add_argument("repository", help="user/name on the hub; made if it is not there")
    parser.add_argument("--license", help="default: what the model's card says")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    options = parser.parse_args(arguments)

    from sparton.hub import push

    terms = {"license": options.license, "private": options.private}
    with flags_named():
        print(push(options.model, options.repository, **terms))
