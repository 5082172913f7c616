"""Files of models, in a local folder or a repository of the Hugging Face hub."""

from pathlib import Path

from transformers.utils import cached_file
from transformers.utils.hub import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError


def optional_file(
    name: str, file: str, revision: str | None = None, subfolder: str = ""
) -> Path | None:
    """Path of a file of a local folder or hub repository, None where it is not there, or the hub
    cannot be reached.

    Raises:
        OSError: the hub has no such repository or revision, or does not show it to this user.
    """
    try:
        found = cached_file(
            name,
            file,
            revision=revision,
            subfolder=subfolder,
            _raise_exceptions_for_missing_entries=False,
        )
    except OSError as error:
        raise OSError(_hub_answer(name, revision, error)) from error
    return None if found is None else Path(found)


def _hub_answer(name: str, revision: str | None, error: OSError) -> str:
    """In one sentence what transformers tells in paragraphs."""
    match error.__cause__:
        case GatedRepoError():
            return (
                f"{name}: the hub shows this model to those only who accept its terms at "
                f"https://huggingface.co/{name}; then log in with `hf auth login`"
            )
        case RepositoryNotFoundError():
            return (
                f"{name}: no such folder, and no such model on the hub "
                "(https://huggingface.co/models has the names; a private one needs `hf auth login`)"
            )
        case RevisionNotFoundError():
            return f"{name} has no revision={revision} on the hub: name a branch, tag or commit"
    return f"{name}: {' '.join(str(error).split())}"
