"""Loading and unloading LoRAs while the server runs, under vLLM's routes, from one folder and no other place."""

from __future__ import annotations

from pathlib import Path

from vivace.adapters.registry import NAME
from vivace.errors import BusyError, CapacityError, CheckpointError, UsageError
from vivace.serve.api_error import APIError
from vivace.serve.bodies import LoadLoraBody, UnloadLoraBody
from vivace.serve.catalog import Catalog
from vivace.serve.validation import fields_of


class LoraRoutes:
    """Answers ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

    def __init__(self, catalog: Catalog, folder: Path | None) -> None:
        """Take names inside ``folder``; None takes none."""
        self._catalog = catalog
        self._folder = None if folder is None else folder.resolve()

    def load(self, raw: bytes) -> str:
        """Serve a LoRA of the folder from now on; return a sentence that says so.

        Raises:
            APIError: the body is wrong (400), this server loads none (403), or the adapter cannot be had (400, 404,
                409, 429).
        """
        body = fields_of(LoadLoraBody, raw)
        name = body.lora_name if body.lora_path is None else body.lora_path
        place = self._inside(name)
        if body.lora_name in self._catalog.names():
            raise APIError(409, f"the name {body.lora_name!r} is taken; unload it first", param="lora_name")
        try:
            self._catalog.add(body.lora_name, place)
        except BusyError as exc:
            raise APIError(429, str(exc), param="lora_name", code="memory_exceeded") from None
        except CapacityError as exc:
            raise APIError(400, str(exc), param="lora_name", code="too_large_for_memory") from None
        except (CheckpointError, UsageError) as exc:
            raise APIError(400, str(exc).replace(str(place), name), param="lora_path") from None
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    def unload(self, raw: bytes) -> str:
        """Serve a LoRA no more; return a sentence that says so.

        Raises:
            APIError: the body is wrong (400), this server unloads none (403), there is no such adapter (404), or a
                request runs or waits with it (409).
        """
        body = fields_of(UnloadLoraBody, raw)
        self._require_folder()
        try:
            self._catalog.remove(body.lora_name)
        except BusyError as exc:
            raise APIError(409, str(exc), param="lora_name", code="adapter_in_use") from None
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise APIError(
                403, "this server neither loads nor unloads adapters; start it with --adapter-folder DIR and a key"
            )
        return self._folder

    def _inside(self, name: str) -> Path:
        """Return the adapter of a name inside the folder.

        Raises:
            APIError: the name leaves the folder, or there is nothing of this name.
        """
        folder = self._require_folder()
        place = folder / name if NAME.fullmatch(name) else None
        if place is None or place.resolve() != place:
            raise APIError(
                400,
                f"lora_path is {name[:100]!r}; give the name of an adapter inside the server's folder, no path and no "
                "link",
                param="lora_path",
            )
        if not place.is_dir():
            raise APIError(404, f"there is no adapter {name!r} in the server's folder", param="lora_path")
        if any(each.is_symlink() for each in place.iterdir()):
            raise APIError(400, f"the adapter {name!r} has links among its files; copy them", param="lora_path")
        return place
