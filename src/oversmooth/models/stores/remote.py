"""Folders that are not on this machine: web addresses, the hub, and every other location that fsspec can read."""

import os
import re
from pathlib import Path

from oversmooth.errors import MissingDependency, RemoteUnavailable, reason_of
from oversmooth.models.stores.addressed import AddressedFolder
from oversmooth.models.stores.attempts import COPY_IT, retried
from oversmooth.models.stores.files import Folder, LocalFolder, RangedFile
from oversmooth.models.stores.http import HttpFolder


def remote_folder(url: str, headers: dict[str, str] | None = None, *, query: str = "") -> Folder:
    """The folder behind a URL of any protocol."""
    if url.startswith(("http://", "https://")):
        return HttpFolder(url, headers, query=query)
    return FsspecFolder(url, query=query)


class FsspecFolder(AddressedFolder):
    """A folder of a protocol that fsspec knows (s3, gs, ssh, ...), read without read-ahead."""

    def __init__(self, url: str, *, query: str = ""):
        try:
            import fsspec
        except ImportError as error:
            raise MissingDependency("fsspec", "hf", "reading from a URL") from error
        super().__init__(url, query)
        try:
            self._fs, _ = fsspec.core.url_to_fs(self.label)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise RemoteUnavailable(self.label, str(error), "Use http(s)://, hf:// or a local copy.") from error
        except OSError as error:  # a host that is asked for at once, as by ftp
            raise RemoteUnavailable(self.label, reason_of(error)) from error

    def _size(self, address: str) -> int | None:
        size: int | None = retried(address, lambda: self._fs.info(address)).get("size")
        return size

    def _open(self, address: str) -> RangedFile:
        file = retried(address, lambda: self._fs.open(address, "rb", cache_type="none"))
        if not getattr(file, "size", None) or not file.seekable():
            file.close()
            raise RemoteUnavailable(address, "it has no size or no byte ranges", COPY_IT)

        def fetch(start: int, stop: int) -> bytes:
            file.seek(start)
            return bytes(file.read(stop - start))

        return RangedFile(address, file.size, lambda start, stop: retried(address, lambda: fetch(start, stop)))


def hub_folder(repo: str, revision: str | None = None, subfolder: str = "") -> HttpFolder:
    """A model repository on the Hugging Face hub, read by byte ranges with the user's own token where there is one."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingDependency("huggingface_hub", "hf", "reading from the hub") from error
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise RemoteUnavailable(
            f"the hub model {repo!r}", "HF_HUB_OFFLINE is set", "Unset it, or point at a local folder."
        )
    try:
        url = huggingface_hub.hf_hub_url(repo, "FILE", revision=revision, subfolder=subfolder or None)
    except HFValidationError as error:
        raise RemoteUnavailable(f"the hub model {repo!r}", str(error).rstrip("."), "Check its name.") from error
    return HttpFolder(url.removesuffix("/FILE"), headers=_headers())


def _headers() -> dict[str, str]:
    """Who asks, and the user's token unless it is not to be sent by itself.

    huggingface_hub's own headers also name the agent that a program runs in, and ask the hub for a list of agents first:
    a request that nobody waits with and nobody counts.
    """
    from importlib.metadata import version

    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {
        "User-Agent": f"oversmooth/{version('oversmooth')}",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


def cached_hub_folder(repo: str, revision: str | None = None) -> LocalFolder | None:
    """The local copy that an earlier download left in the hub cache, if it holds a config."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except (HFValidationError, OSError):  # no repository can have that name
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    weights = folder and any(re.search(r"\.(safetensors|bin)$", name) for name in os.listdir(folder))
    return LocalFolder(folder) if folder and weights else None
