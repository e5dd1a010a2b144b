"""A model as one file of bundles, to be read piece by piece: what ``vivace convert --store`` writes.

A store is a folder: the checkpoint's own JSON and tokenizer files, ``weights.store`` and ``store.json``. In the file a
*bundle* is what is read at once, and begins on a page:

    resident                 what always stays in memory: embedding, head, norms, biases, routers
    layers.N.attention       qkv (rows q | k | v) and o
    layers.N.feed_forward    up (rows gate | up when gated) and down, in the layout ``layers``
    layers.N.experts.X       the same of one expert
    layers.N.neurons         F records, each one neuron's gate row, up row and down column, in the layout ``neurons``
    layers.N.selector        the matrix that decides which neurons are active (gate, or up where there is no gate), in
                             the layout ``selected``; the records of ``layers.N.neurons`` then lack its row

In a store for native kernels, matrices that are read while they are used lie in tiles as those read them (``pack`` in
``kernels/native.py``), or quantized in one of the formats of ``kernels/layouts.py``; so does what is resident of
attention and feed-forwards.

Row-column bundling: Alizadeh et al. 2023, LLM in a flash, arXiv:2312.11514, section 3.2. An incomplete or foreign store
is recognised: the file carries the identity of its index, its length is known, and every bundle has a checksum. Behind
the last bundle lies a table with a checksum for every page before it, which the readers compare (``io/checksums.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import torch

from vivace.checkpoint.adapters import STORE, STORE_DATA
from vivace.checkpoint.families import translate
from vivace.checkpoint.files import read_json, resolve
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError, nearest
from vivace.kernels.layouts import LAYOUTS, Laid, layout_of
from vivace.kernels.library import LANES
from vivace.kernels.low_bit import LowBit
from vivace.kernels.native import unpack
from vivace.storage.io.readers import PAGE
from vivace.units import format_bytes

Layout = Literal["layers", "neurons", "selected"]

INDEX, DATA = STORE, STORE_DATA
MAGIC = b"vivace store 1\n"
FORMATS = (1, 2, 3, 4)
"""1 has matrices in rows and 2 in tiles; 3 has either, and a table of the checksums of all pages; 4 quantized ones."""
QUANTIZED = 4
"""The first format with quantized matrices; stores without them are written in the one before."""
CHECKED = 3
"""The first format with a table of checksums."""
LINE = 64
"""Tensors in a bundle begin at multiples of this many bytes; those of an expert follow each other directly."""


@dataclass(frozen=True)
class Part:
    """A tensor in a bundle, or in each of its records."""

    name: str
    """The parameter, by our name; in a record "gate", "up" or "down"."""
    shape: tuple[int, ...]
    """(out, in), (tiles, pairs, 16, 2), or the shape of a vector."""
    offset: int
    """Bytes from the beginning of the bundle or record."""
    weights: str = ""
    """Format of a quantized matrix (``kernels/layouts.py``), whose shape is (out, in); empty for plain numbers."""

    @property
    def is_tiled(self) -> bool:
        """Return whether the matrix lies as native kernels read it: in tiles, or quantized."""
        return len(self.shape) == 4 or bool(self.weights)

    @property
    def num_tiles(self) -> int:
        """How many times sixteen outputs a matrix for native kernels has."""
        return self.shape[0] // LANES if self.weights else self.shape[0]

    @property
    def in_width(self) -> int:
        """Number of inputs of a matrix for native kernels."""
        return self.shape[1] if self.weights else 2 * self.shape[1]

    def num_bytes(self, item: int) -> int:
        """Return the bytes that it takes, if one plain number takes ``item``."""
        return layout_of(self.weights).num_bytes(*self.shape) if self.weights else prod(self.shape) * item


@dataclass(frozen=True)
class Bundle:
    """Bytes that are read together, or ``count`` records of which each is."""

    name: str
    offset: int
    """Bytes from the beginning of the file."""
    num_bytes: int
    parts: tuple[Part, ...]
    count: int = 1
    stride: int = 0
    """Bytes from one record to the next."""
    checksum: int = 0
    """CRC-32 of the bundle, the padding between records included."""

    def start(self, record: int = 0) -> int:
        """Return where a record begins in the file."""
        return self.offset + record * self.stride

    @property
    def num_pages_bytes(self) -> int:
        """Bytes up to the end of the last page, which a direct read takes."""
        return -(-self.num_bytes // PAGE) * PAGE


@dataclass(frozen=True)
class PageTable:
    """Where the table lies that holds the checksums of all pages before it, four bytes each."""

    offset: int
    """Bytes from the beginning of the file."""
    num_bytes: int
    checksum: int
    """CRC-32 of the table."""


@dataclass(frozen=True)
class Store:
    """The index of a store; the file itself is read by a ``Reader`` (``io/readers.py``)."""

    folder: Path
    config: ModelConfig
    layout: Layout
    dtype: torch.dtype
    identity: str
    num_bytes: int
    bundles: Mapping[str, Bundle]
    base: str = ""
    """``base_hash`` of the checkpoint it was made from."""
    page_sums: PageTable | None = None
    """None for a store of an older format; damage to what is streamed goes unnoticed then."""

    @property
    def path(self) -> Path:
        """Path of the file of bundles."""
        return self.folder / DATA

    @property
    def is_tiled(self) -> bool:
        """Return whether matrices lie in tiles, as native kernels read them."""
        return any(part.is_tiled for bundle in self.bundles.values() for part in bundle.parts)

    def __getitem__(self, name: str) -> Bundle:
        """Return a bundle by its name.

        Raises:
            NotFoundError: there is none of this name.
        """
        if name not in self.bundles:
            raise NotFoundError(f"{self.folder} (layout {self.layout}) has no bundle {name}; convert the model again")
        return self.bundles[name]

    @property
    def weights(self) -> str:
        """Format of the matrices that are read while they are used: "bf16" for all plain numbers."""
        return next((part.weights for bundle in self.bundles.values() for part in bundle.parts if part.weights), "bf16")

    def tensors(self, name: str, memory: torch.Tensor) -> dict[str, Laid]:
        """Return the parts of a bundle that was read into ``memory`` (num_bytes,) uint8, as views of it."""
        return {part.name: view(memory, part, self.dtype) for part in self[name].parts}

    def records(self, name: str, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of n records in ``memory`` (n, stride) uint8, each (n, width), as views of it."""
        found = {}
        for part in self[name].parts:
            stop = part.offset + prod(part.shape) * self.dtype.itemsize
            found[part.name] = memory[:, part.offset : stop].view(self.dtype)
        return found


def view(memory: torch.Tensor, part: Part, dtype: torch.dtype) -> Laid:
    """Return a part as a view of the bytes of its bundle, (num_bytes,) uint8."""
    if part.weights:
        return layout_of(part.weights).view(memory[part.offset :], *part.shape)
    stop = part.offset + prod(part.shape) * dtype.itemsize
    return memory[part.offset : stop].view(dtype).view(part.shape)


def in_rows(values: Laid) -> torch.Tensor:
    """Return a part as (out, in), whether it lies in tiles or not; of a quantized one what its codes stand for."""
    if isinstance(values, LowBit):
        return values.dense().to(torch.bfloat16)
    return unpack(values) if values.dim() == 4 else values


def is_store(folder: str | Path) -> bool:
    """Return whether a folder holds a store."""
    return (Path(folder).expanduser() / INDEX).is_file()


def open_store(folder: str | Path) -> Store:
    """Read the index of a store and check it against the file, of which only the beginning is read.

    Raises:
        NotFoundError: there is no store, or one of its files is missing.
        CorruptError: the index cannot be read, or the file has another length than it says.
        MismatchError: the file is not a store, or belongs to another index.
    """
    found = resolve(folder)
    index = read_json(found / INDEX)
    if index.get("format") not in FORMATS:
        known = ", ".join(map(str, FORMATS))
        raise MismatchError(
            f"{found / INDEX} has format {index.get('format')!r}; this version reads {known}: convert again"
        )
    try:
        store = _from_json(found, index)
        _check_places(store)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptError(f"{found / INDEX} is not an index of a store ({exc!r}); convert the model again") from exc
    _check_file(store)
    return store


def _from_json(folder: Path, index: Mapping[str, Any]) -> Store:
    dtype = getattr(torch, str(index["dtype"]), None)
    if index["layout"] not in get_args(Layout) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"layout {index['layout']}, dtype {index['dtype']}")
    bundles = {}
    for item in index["bundles"]:
        parts = tuple(Part(p["name"], tuple(p["shape"]), p["offset"], p.get("weights", "")) for p in item["parts"])
        for part in parts:
            if part.weights and part.weights not in LAYOUTS:
                raise ValueError(f"matrices in {part.weights}")
        bundles[item["name"]] = Bundle(**{**item, "parts": parts})
    config = translate(read_json(folder / "config.json"))
    table = PageTable(**index["page_sums"]) if index["format"] >= CHECKED else None
    return Store(
        folder, config, index["layout"], dtype, index["identity"], index["bytes"], bundles, index["base"], table
    )


def _check_places(store: Store) -> None:
    """Raise ``ValueError`` where bundles do not follow one another, or have other parts than the layout says."""
    end, layers = PAGE, range(store.config.num_layers)
    parts = {name: names for index in layers for name, names, _ in _layer(store.config, index, store.layout)}
    for bundle in store.bundles.values():
        numbers = (bundle.num_bytes, bundle.count, bundle.stride, bundle.checksum)
        if bundle.offset != end or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"bundle {bundle.name} at {bundle.offset}, expected at {end}")
        end += bundle.num_pages_bytes
        is_whole = bundle.count == 1 and not bundle.name.endswith(".selector")
        if is_whole and bundle.name in parts and [part.name for part in bundle.parts] != parts[bundle.name]:
            raise ValueError(f"parts of bundle {bundle.name}")
        room = bundle.stride or bundle.num_bytes
        for part in bundle.parts:
            if part.offset < 0 or part.offset + part.num_bytes(store.dtype.itemsize) > room:
                raise ValueError(f"{part.name} lies outside of bundle {bundle.name}")
    if not isinstance(store.num_bytes, int) or store.num_bytes < end:
        raise ValueError(f"{len(store.bundles)} bundles in {store.num_bytes} bytes")


def _check_file(store: Store) -> None:
    path = store.path
    if not path.is_file():
        raise NotFoundError(f"{store.folder} has no {DATA}; convert the model again")
    with path.open("rb") as file:
        head = file.read(PAGE)
    if not head.startswith(MAGIC):
        raise MismatchError(f"{path} is no store: it does not begin with {MAGIC.decode().strip()!r}")
    identity = head[len(MAGIC) :].split(b"\n", 1)[0].decode("ascii", "replace")
    if identity != store.identity:
        raise MismatchError(f"{path} belongs to index {identity}, {INDEX} is {store.identity}; convert the model again")
    size = path.stat().st_size
    if size != store.num_bytes:
        raise CorruptError(
            f"{path} has {size} bytes, its index says {store.num_bytes} ({format_bytes(store.num_bytes)}): "
            "it is truncated or was changed; convert the model again"
        )


def verify(store: Store, block_bytes: int = 1 << 22) -> None:
    """Read the whole file, and compare the checksums of all bundles and that of the table of pages.

    Raises:
        CorruptError: a checksum differs; the message names the bundle.
    """
    table = store.page_sums
    with store.path.open("rb") as file:
        for bundle in store.bundles.values():
            checksum = _checksum(file, bundle.offset, bundle.num_bytes, block_bytes)
            if checksum != bundle.checksum:
                raise CorruptError(
                    f"{store.path}: bundle {bundle.name} has checksum {checksum:08x}, its index says "
                    f"{bundle.checksum:08x}; convert the model again"
                )
        if table is not None and _checksum(file, table.offset, table.num_bytes, block_bytes) != table.checksum:
            raise table_is_damaged(store)


def table_is_damaged(store: Store) -> CorruptError:
    """Return the error of a table of checksums that is damaged itself."""
    return CorruptError(f"{store.path}: its table of checksums is damaged; restore the file or convert the model again")


def _checksum(file: BinaryIO, offset: int, num_bytes: int, block_bytes: int) -> int:
    """Compute the CRC-32 of a part of a file, or of as much of it as there is."""
    file.seek(offset)
    checksum = 0
    while num_bytes and (block := file.read(min(num_bytes, block_bytes))):
        checksum, num_bytes = zlib.crc32(block, checksum), num_bytes - len(block)
    return checksum


def arrange(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
    item: int,
    *,
    is_tiled: bool = False,
    weights: str = "bf16",
) -> list[Bundle]:
    """Lay out a store: decide where each parameter lies.

    Args:
        config: the model.
        shapes: of all its parameters, by our names.
        layout: how feed-forwards lie.
        item: bytes of one number.
        is_tiled: whether matrices of layers lie in tiles; they must fit (``fits_tiles``).
        weights: format of these matrices, one of ``LAYOUTS``; all but "bf16" need tiles.

    Raises:
        ConfigError: the layout is for another kind of model.
    """
    check_fits(config, check_layout(layout))
    streamed = [spec for index in range(config.num_layers) for spec in _layer(config, index, layout)]
    taken = {name for _, names, _ in streamed for name in names}
    resident = [name for name in shapes if name not in taken]
    specs = [("resident", resident, 1), *streamed]
    offset, bundles = PAGE, []
    lying = dict(shapes)
    quantized = taken if weights != "bf16" else set()
    if is_tiled and not quantized:
        lying |= {name: (out // LANES, width // 2, LANES, 2) for name in taken for out, width in [shapes[name]]}
    for name, names, count in specs:
        bundle = _records(config, name, count, layout, item) if count > 1 else _whole(name, names, lying, item)
        if quantized and name != "resident":
            bundle = _quantized(name, names, shapes, weights)
        bundles.append(replace(bundle, offset=offset))
        offset += bundle.num_pages_bytes
    return bundles


def fits_tiles(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether every matrix of the layers fills whole tiles, as native kernels fuse and cut them."""
    layers = (spec for index in range(config.num_layers) for spec in _layer(config, index, "layers"))
    matrices = {name: shapes[name] for _, names, _ in layers for name in names}
    if config.gated and config.ffn_bias:  # gate and up are cut apart, their bias is not
        return False
    cut = {name: 2 if config.gated and name.endswith(".up.weight") else 1 for name in matrices}
    return all(out // cut[name] % LANES == 0 and width % 2 == 0 for name, (out, width) in matrices.items())


def check_layout(layout: str) -> Layout:
    """Return a layout by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if layout not in get_args(Layout):
        raise ConfigError(f"there is no layout {layout!r}{nearest(layout, get_args(Layout))}")
    return layout  # type: ignore[return-value]


def check_fits(config: ModelConfig, layout: Layout) -> None:
    """Check that a layout suits a model.

    Raises:
        ConfigError: the model has no neurons that could be laid out so.
    """
    if layout != "layers" and config.moe is not None:
        raise ConfigError(f"layout {layout} is for dense feed-forwards; experts are bundles of their own in 'layers'")
    if layout == "neurons" and config.activation != "relu":
        raise ConfigError(
            f"layout neurons is for models with ReLU, this one has {config.activation}: few of its neurons are zero; "
            "use 'selected' (thresholds) or 'layers' (exact)"
        )


def _layer(c: ModelConfig, index: int, layout: Layout) -> list[tuple[str, list[str], int]]:
    """List the bundles of a layer: (name, parameters, number of records)."""
    ours = f"layers.{index}."
    feed = f"{ours}feed_forward."
    attention = (f"{ours}attention", [f"{ours}qkv.weight", f"{ours}o.weight"], 1)
    if c.is_moe(index):
        assert c.moe is not None
        experts = [f"{feed}experts.{expert}." for expert in range(c.moe.num_experts)]
        bundles = [(f"{ours}experts.{x}", [f"{e}up.weight", f"{e}down.weight"], 1) for x, e in enumerate(experts)]
        return [attention, *bundles]
    matrices = [f"{feed}up.weight", f"{feed}down.weight"]
    if layout == "layers":
        return [attention, (f"{ours}feed_forward", matrices, 1)]
    neurons = (f"{ours}neurons", matrices, c.ffn_width)
    return [attention, (f"{ours}selector", [], 1), neurons] if layout == "selected" else [attention, neurons]


def _whole(name: str, names: list[str], shapes: Mapping[str, tuple[int, ...]], item: int) -> Bundle:
    parts, offset = [], 0
    if name.endswith(".selector"):
        feed = name.removesuffix("selector") + "feed_forward."
        width = shapes[f"{feed}down.weight"]
        return Bundle(name, 0, prod(width) * item, (Part("selector", width[::-1], 0),))
    line = 1 if ".experts." in name else LINE
    for each in names:
        offset = -(-offset // line) * line
        parts.append(Part(each, shapes[each], offset))
        offset += prod(shapes[each]) * item
    return Bundle(name, 0, offset, tuple(parts))


def _quantized(name: str, names: list[str], shapes: Mapping[str, tuple[int, ...]], weights: str) -> Bundle:
    parts, offset = [], 0
    for each in names:
        parts.append(Part(each, shapes[each], offset, weights))
        offset += parts[-1].num_bytes(0)
    return Bundle(name, 0, offset, tuple(parts))


def _records(c: ModelConfig, name: str, count: int, layout: Layout, item: int) -> Bundle:
    names = ["gate", "up", "down"] if c.gated else ["up", "down"]
    if layout == "selected":
        names = names[1:]
    width = c.width * item
    parts = tuple(Part(each, (c.width,), place * width) for place, each in enumerate(names))
    stride = -(-len(names) * width // PAGE) * PAGE
    return Bundle(name, 0, count * stride, parts, count, stride)


def to_json(
    identity: str,
    base: str,
    layout: Layout,
    dtype: torch.dtype,
    num_bytes: int,
    bundles: list[Bundle],
    page_sums: PageTable,
) -> dict[str, Any]:
    """Return the index as it is written to JSON."""
    is_quantized = any(part.weights for bundle in bundles for part in bundle.parts)
    return {
        "format": QUANTIZED if is_quantized else CHECKED,
        "base": base,
        "identity": identity,
        "layout": layout,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": num_bytes,
        "bundles": [asdict(bundle) for bundle in bundles],
        "page_sums": asdict(page_sums),
    }
