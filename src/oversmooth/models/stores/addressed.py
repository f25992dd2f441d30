"""What folders behind an address share: files by name, none of them listed."""

from abc import ABC, abstractmethod

from oversmooth.errors import RemoteUnavailable
from oversmooth.models.stores.files import RangedFile


class AddressedFolder(ABC):
    """A folder whose files have addresses: its own, the name, and what comes behind it (a signature, say)."""

    def __init__(self, url: str, query: str):
        self.label = url.rstrip("/")
        self._query = query

    def listing(self) -> None:
        return None

    def has(self, name: str) -> bool:
        try:
            self._size(self._address(name))
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> RangedFile:
        address = self._address(name)
        try:
            return self._open(address)
        except FileNotFoundError as error:
            raise RemoteUnavailable(address, "there is no such file") from error

    def _address(self, name: str) -> str:
        return f"{self.label}/{name}{self._query}"

    @abstractmethod
    def _size(self, address: str) -> int | None:
        """Bytes of a file, where that is known without reading it; raises `FileNotFoundError` where there is none."""

    @abstractmethod
    def _open(self, address: str) -> RangedFile:
        """The file; raises `FileNotFoundError` where there is none."""
