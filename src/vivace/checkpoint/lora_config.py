"""``adapter_config.json`` of a LoRA of PEFT: which modules it adapts, with which ranks and factors.

Modules are named as PEFT names them: by endings, by a regular expression or by ``all-linear``, and in some layers or in
all. Ranks and alphas may differ by module. What goes beyond a LoRA is listed, so that it is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vivace.checkpoint.files import read_json
from vivace.errors import ConfigError, CorruptError, NotFoundError, UnsupportedError

CONFIG = "adapter_config.json"
DRAFTING = "drafting"
"""Folder of draft weights inside that of a LoRA, one for each method."""
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings:
    """What ``adapter_config.json`` says, as far as the mathematics depends on it."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | str | None
    """Endings of module names, a regular expression, or "all-linear"; None leaves it to the tensors."""
    excluded: tuple[str, ...] | str = ()
    layers: frozenset[int] | None = None
    """Layers that are adapted; None is all."""
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    extras: tuple[str, ...] = ()
    """Settings that change the mathematics beyond a LoRA, as ``key = value``."""
    base_name: str | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its full name."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor on B A of a module, by its full name."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def aims_at(self, module: str) -> bool:
        """Return whether a module is adapted, by its full name; ``all-linear`` takes every one."""
        if _is_named(self.excluded, module):
            return False
        if isinstance(self.targets, str) or self.targets is None:
            return self.targets is None or self.targets.lower() == _ALL_LINEAR or _is_named(self.targets, module)
        if module in self.targets:
            return True
        return _is_named(self.targets, module) and self._takes_layer(module)

    def _takes_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        found = None
        for pattern in self.layers_pattern or (r"[^.]*",):
            before = r".*?\." if not self.layers_pattern else r"(?:^|.*?\.)"
            found = found or re.match(rf"{before}{pattern}\.(\d+)\.", module)
        return found is not None and int(found[1]) in self.layers


def _is_named(names: tuple[str, ...] | str, module: str) -> bool:
    """Return whether a list of endings, or a regular expression, names a module."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern(patterns: Iterable[str], module: str) -> str:
    """Return the first pattern that matches a module from some dot on to its end, or the module's name."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def by_kind(
    adapters: str | Path | Mapping[str, str | Path] | None,
) -> tuple[dict[str, Path], list[Path]]:
    """Return LoRAs by name, and the folders of draft weights: the files say which is which.

    Raises:
        ConfigError: they are neither a folder nor folders by name.
    """
    if adapters is None:
        return {}, []
    named_badly = isinstance(adapters, Mapping) and not all(isinstance(each, str | Path) for each in adapters.values())
    if not isinstance(adapters, str | Path | Mapping) or named_badly:
        raise ConfigError(f"adapters are a folder, or folders by name, found {adapters!r}")
    named = adapters if isinstance(adapters, Mapping) else {Path(adapters).name: adapters}
    folders = {name: Path(folder).expanduser() for name, folder in named.items()}
    loras = {name: folder for name, folder in folders.items() if is_lora(folder)}
    return loras, [folder for name, folder in folders.items() if name not in loras]


def is_lora(folder: str | Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG).is_file()


def read_settings(folder: str | Path) -> LoraSettings:
    """Read ``adapter_config.json``.

    Raises:
        NotFoundError: there is no such folder or file.
        CorruptError: the file is not JSON, or a key has a value that PEFT does not write.
        UnsupportedError: the folder holds another kind of adapter than LoRA.
    """
    place = Path(folder)
    if not place.is_dir():
        raise NotFoundError(f"there is no adapter directory {place}")
    raw = read_json(place / CONFIG)
    kind = str(raw.get("peft_type"))
    if kind.upper() != "LORA":
        raise UnsupportedError(f"{place} is an adapter of the kind {kind}; only LORA is read")
    try:
        settings = _settings(raw)
    except (TypeError, ValueError, AttributeError, re.error) as exc:
        raise CorruptError(f"{place / CONFIG} is not a LoRA's configuration: {exc}") from exc
    smallest = min([settings.rank, *settings.rank_pattern.values()])
    if smallest < 1:
        raise CorruptError(f"{place / CONFIG} has rank {smallest}; a LoRA has rank 1 at least")
    return settings


_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "use_bdlora": (False, {}),
    "megatron_config": ({},),
    "arrow_config": ({},),
    "velora_config": ({},),
    "kasa_config": ({},),
    "monteclora_config": ({},),
}
"""Settings that a plain LoRA leaves at these values, or at None."""
_LARGEST = 1e30
"""Largest alpha; a factor of float32 must not overflow by it."""
_ON_ANOTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT changes the base's weights when it loads the adapter, unless the
adapter was converted while it was saved; the setting is then another.
"""


def _settings(raw: Mapping[str, Any]) -> LoraSettings:
    layers = raw.get("layers_to_transform")
    chosen = layers if isinstance(layers, list) else [] if layers is None else [layers]
    extras = [f"{key} = {json.dumps(raw[key])}" for key, plain in _PLAIN.items() if raw.get(key) not in (None, *plain)]
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_ON_ANOTHER_BASE):
        extras.append(f"init_lora_weights = {json.dumps(init)}")
    found = LoraSettings(
        rank=_whole(raw.get("r", 8)),
        alpha=_finite(raw.get("lora_alpha", 8)),
        targets=_names(raw.get("target_modules")),
        excluded=_names(raw.get("exclude_modules")) or (),
        layers=None if not chosen else frozenset(map(_whole, chosen)),
        layers_pattern=_listed(raw.get("layers_pattern")),
        rank_pattern={str(key): _whole(value) for key, value in (raw.get("rank_pattern") or {}).items()},
        alpha_pattern={str(key): _finite(value) for key, value in (raw.get("alpha_pattern") or {}).items()},
        use_rslora=_claim(raw.get("use_rslora")),
        use_dora=_claim(raw.get("use_dora")),
        extras=tuple(extras),
        base_name=raw.get("base_model_name_or_path"),
    )
    expressions = [key for names in (found.targets, found.excluded) if isinstance(names, str) for key in (names,)]
    for expression in (*expressions, *found.rank_pattern, *found.alpha_pattern, *found.layers_pattern):
        re.compile(expression)
    return found


def _whole(value: object) -> int:
    """Return a whole number; text, and what has a fraction, is none."""
    is_fraction = isinstance(value, float) and not value.is_integer()
    if isinstance(value, bool) or not isinstance(value, int | float) or is_fraction:
        raise TypeError(f"expected a whole number, found {value!r}")
    return int(value)


def _finite(value: object) -> float:
    """Return a number that float32 can hold, so that no factor becomes infinite because of it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    if not abs(value) <= _LARGEST:
        raise ValueError(f"expected a number of at most {_LARGEST:g}, found one that is larger or none")
    return float(value)


def _claim(value: object) -> bool:
    """Return whether a setting is on; null counts as off."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {value!r}")
    return value is True


def _names(value: object) -> tuple[str, ...] | str | None:
    """Return a list of names, or an expression, as ``adapter_config.json`` has either."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"expected names, found {value!r}")
    return tuple(map(str, value))


def _listed(value: object) -> tuple[str, ...]:
    found = _names(value)
    return (found,) if isinstance(found, str) and found else tuple(found or ())
