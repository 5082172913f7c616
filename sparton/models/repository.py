"""Files of models, in a local folder or a repository of the Hugging Face hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from huggingface_hub import model_info
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers.utils import cached_file
from transformers.utils.hub import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from sparton.reading import Fields, read_json

Arguments = Mapping[str, Any]


def join(*parts: str) -> str:
    """A path within a folder or repository; empty parts are left out."""
    return "/".join(part for part in parts if part)


class ReadingOptions(TypedDict, total=False):
    """How a model is read; see :class:`Source`."""

    revision: str | None
    cache_dir: str | None
    model_args: Arguments | None
    tokenizer_args: Arguments | None
    config_args: Arguments | None


class Source(NamedTuple):
    """A folder or a repository of the hub, and how transformers reads the checkpoint in it.

    Attributes:
        name: path or hub name.
        revision: branch, tag or commit on the hub.
        cache_dir: where files of the hub are kept; None for the usual place of its library.
        model_args, tokenizer_args, config_args: further arguments of transformers'
            ``from_pretrained`` of the model, the tokenizer and the configuration, as
            sentence-transformers takes them (``model_kwargs``, ``processor_kwargs``,
            ``config_kwargs``).
    """

    name: str
    revision: str | None = None
    cache_dir: str | None = None
    model_args: Arguments | None = None
    tokenizer_args: Arguments | None = None
    config_args: Arguments | None = None

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, name: "str | Path | Source") -> "Source":
        """A source by its path or hub name alone; itself where it is one already."""
        return name if isinstance(name, cls) else cls(str(name))

    @property
    def place(self) -> dict[str, str | None]:
        """What transformers' ``from_pretrained`` is told of it beside its name."""
        return {"revision": self.revision, "cache_dir": self.cache_dir}

    def check_reachable(self) -> None:
        """Ask the hub once whether it is there, since files are asked for again and again.

        Raises:
            FileNotFoundError: it gives no answer.
        """
        try:
            model_info(self.name, revision=self.revision, timeout=10)
        except HfHubHTTPError:
            pass  # an answer; what it means is said of the files
        except Exception as error:  # of whichever library its client is written with
            raise FileNotFoundError(
                f"{self.name}: no such folder, no such model in the cache of the hub, and the hub "
                f"cannot be reached ({' '.join(str(error).split())})"
            ) from error

    def file(self, file: str, subfolder: str = "", *, cached: bool = False) -> Path | None:
        """Path of a file, None where it is not there, or the hub cannot be reached.

        Args:
            file: its name.
            subfolder: where it is in the folder or repository.
            cached: do not ask the hub.

        Raises:
            OSError: the hub has no such repository or revision, or does not show it to this user.
        """
        try:
            found = cached_file(
                self.name,
                file,
                **self.place,
                subfolder=subfolder,
                local_files_only=cached,
                _raise_exceptions_for_missing_entries=False,
            )
        except OSError as error:
            raise OSError(self._answer(error)) from error
        return None if found is None else Path(found)

    def json(self, file: str, subfolder: str = "") -> Any:
        """Content of a JSON file, None where it is not there.

        Raises:
            ValueError: it is no JSON, or null.
            OSError: as :meth:`file`.
        """
        path = self.file(file, subfolder)
        if path is None:
            return None
        content = read_json(path)
        if content is None:
            raise ValueError(f"{path} holds nothing: copy or download it again")
        return content

    def fields(self, file: str, subfolder: str = "") -> Fields:
        """The object in a JSON file, without any key where there is no file.

        Raises:
            ValueError: it is no JSON, or no object.
            OSError: as :meth:`file`.
        """
        content = self.json(file, subfolder)
        place = join(self.name, subfolder, file)
        return Fields.of({} if content is None else content, place)

    def _answer(self, error: OSError) -> str:
        """In one sentence what transformers tells in paragraphs."""
        name = self.name
        match error.__cause__:
            case GatedRepoError():
                return (
                    f"{name}: the hub shows this model to those only who accept its terms at "
                    f"https://huggingface.co/{name}; then log in with `hf auth login`"
                )
            case RepositoryNotFoundError():
                return (
                    f"{name}: no such folder, and no such model on the hub "
                    "(https://huggingface.co/models has the names; a private one needs `hf auth "
                    "login`)"
                )
            case HFValidationError():
                return f"{name}: no such folder, and no model on the hub can have this name"
            case RevisionNotFoundError():
                return (
                    f"{name} has no revision={self.revision} on the hub: name a branch, tag or "
                    "commit"
                )
        return f"{name}: {' '.join(str(error).split())}"
