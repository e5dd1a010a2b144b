"""EAGLE: a one-layer decoder that predicts the model's own final residuals (Li et al. 2024, arXiv:2401.15077).

With f_t the normed final residual (feature) at position t and e the embedding,

    g_t = layer(C [f_{t-1}; e(x_t)])        x_{t+1} ~ head(g_t)        f_t := norm(g_t) while drafting

The layer is built like the model's own and has its own keys and values; the head and its norm are the model's, frozen.
Positions that were verified run through the layer again with the model's own residuals; entries of a draft are dropped.

Where we differ: features are normed (so is Hugging Face's ``last_hidden_state``, which the authors use); the plan
chooses the shape of the tree, which is fixed in the paper; and the layer may have a narrower feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.backend import TorchBackend
from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig, RopeConfig
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import Forgetful
from vivace.decode.shallow import DraftPlan, guess_below
from vivace.errors import ConfigError

CHUNK = 256
"""Number of positions that run through the layer at once where many are missing, as after a prompt."""


@dataclass(frozen=True)
class EagleConfig:
    """Config of the drafter's own layer."""

    ffn_width: int = 0
    """Width of its feed-forward; 0 is the model's."""

    def __post_init__(self) -> None:
        if self.ffn_width < 0:
            raise ConfigError(f"ffn_width must be >= 0, found {self.ffn_width}")


class EagleLayer(Trained):
    """Trained weights: the map that joins feature and embedding, and a decoder layer."""

    def __init__(self, config: EagleConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.join = nn.Parameter(torch.empty(model.width, 2 * model.width))
        """C, (E, 2 E)."""
        self.body = Decoder(_one_layer(config, model))
        """A decoder of one layer; its embedding and final norm are not used."""
        with torch.no_grad():
            nn.init.kaiming_uniform_(self.join, a=5**0.5)
            self.join[:, : model.width] += torch.eye(model.width)
            for name, weight in self.body.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(1.0 if "norm" in name else 0.0)
                else:
                    writes = name.endswith(("o.weight", "down.weight"))
                    weight.normal_(std=0.0 if writes else 0.5 * weight.shape[1] ** -0.5)

    def forward(self, features: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """Predict residuals (T, E) from normed features and embeddings (T, E)."""
        return self.body.run(F.linear(torch.cat((features, embedded), -1), self.join), step)

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [self.join, *self.body.layers.parameters()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the named weights for a file."""
        layers = {f"body.layers.{name}": value.detach() for name, value in self.body.layers.state_dict().items()}
        return {"join": self.join.detach(), **layers}


def _one_layer(config: EagleConfig, model: ModelConfig) -> ModelConfig:
    return replace(
        model,
        vocab_size=2,
        num_layers=1,
        ffn_width=config.ffn_width or model.ffn_width,
        tied_head=True,
        rope_of_layer=(),
        ropes=(RopeConfig(model.ropes[0].theta, width=model.ropes[0].width),),
        windows=(),
        moe=None,
        moe_layers=(),
        embedding_scale=1.0,
        logit_softcap=None,
    )


class Eagle:
    """Implements ``Drafter``: the trained layer, laid out once for all sessions."""

    name = "eagle"

    def __init__(self, model: Decoder, layer: EagleLayer, plan: DraftPlan, head: DraftHead | None = None) -> None:
        """Draft for ``model`` on the kernels that run its layers; the weights of ``layer`` are packed in place."""
        self.head = DraftHead(model) if head is None else head
        self.model = model
        self.plan = plan
        self._join: Callable[[Tensor], Tensor] = model.backend.projection(layer.join.contiguous())
        self._body = layer.body
        if isinstance(layer.body.backend, TorchBackend):  # its weights are not packed yet
            layer.body.run_on(model.backend.sibling())

    leaves_all_entries = True

    def text_bytes(self, entries: int) -> int:
        """Return the bytes of keys and values of the layer."""
        return self._body.slot_bytes(entries)

    def open(self, cache: KVCache) -> EagleState:
        """State of a session, with a cache for the layer of as many slots and entries as the target's."""
        return EagleState(self, self._body.new_cache(cache.num_slots, cache.capacity, account=cache.account))

    def run(self, own: Draft, rows: Tensor | None, features: Tensor, cache: KVCache, *, chunk: bool = False) -> Tensor:
        """Run rows of the layer's own draft (None: all) through it, given the features (n, E) of the positions before
        them.
        """
        step = Step.of(own, cache, chunk=chunk)
        tokens = own.tokens
        if rows is not None:
            step, tokens = step.take(rows), tokens[rows]
        embedded = self.model.embed(tokens, step)
        return self._body.run(self._join(torch.cat((features, embedded), -1)), step)


class EagleState(Forgetful):
    """Implements ``DraftState``: the layer's cache, and the residuals of positions that have not run through it yet."""

    def __init__(self, drafter: Eagle, cache: KVCache) -> None:
        """Draft with the layer of ``drafter`` and an empty cache of its entries."""
        self.traversal: Traversal = ForwardPass()
        self.cache = cache
        self.model = drafter.model
        self.plan = drafter.plan
        self._head = drafter.head
        self._run = drafter.run
        self._pending: dict[int, list[Tensor]] = {}
        """By slot: normed residuals (n, E) of the last positions that have not run through the layer yet."""

    def propose(self, context: Context) -> Draft:
        """Return a chain or tree for each slot whose last position was seen, from one small pass per depth for all of
        them.
        """
        draft = context.committed()
        room = {slot: context.max_nodes.get(slot, len(self.plan.widths)) for slot in context.slots}
        growing = [slot for slot in context.slots if self._pending.get(slot) and room[slot] > 0]
        if not growing:
            return draft
        cache = self.cache
        own, hidden = self._catch_up(context.tokens, growing, cache)
        above = dict(zip(draft.slots, draft.last_rows, strict=True))
        leaves = torch.tensor([above[slot] for slot in growing], device=draft.device)
        mine = own.last_committed()
        known = hidden[mine]
        for depth, width in enumerate(self.plan.widths):
            draft, own, rows, origin = self._guess(context, (draft, own), (leaves, mine), known, width)
            wanted = [place for place, row in enumerate(rows[0].tolist()) if room[draft.lists.slot[row]] > depth + 1]
            if depth + 1 == len(self.plan.widths) or not wanted:
                break
            keep = torch.tensor(wanted, device=draft.device)
            leaves, mine = rows[0][keep], rows[1][keep]
            known = self._run(own, mine, self.model.norm(known[origin[keep]]), cache)
        cache.commit(own.slots, [range(given) for given in own.committed])
        return draft

    def _guess(
        self, context: Context, drafts: tuple[Draft, Draft], leaves: tuple[Tensor, Tensor], known: Tensor, width: int
    ) -> tuple[Draft, Draft, tuple[Tensor, Tensor], Tensor]:
        """Guess below the leaves in the target's draft and in the drafter's own; also return the leaf index of each
        guess.
        """
        before = len(drafts[0].tokens)
        draws = self.plan.is_chain
        draft, rows = guess_below(self._head, self.plan, context, drafts[0], leaves[0], known, width, draws=draws)
        own, fresh = drafts[1].grow(leaves[1], draft.tokens[before:].view(-1, width))
        places = rows - before
        return draft, own, (rows, fresh[places]), places // width

    def _catch_up(
        self, tokens: Mapping[int, Sequence[int]], slots: Sequence[int], cache: KVCache
    ) -> tuple[Draft, Tensor]:
        """Run pending positions through the layer; return the last stretch as the own draft, with its residuals."""
        features = {slot: torch.cat(self._pending.pop(slot)) for slot in slots}
        for slot in slots:
            if cache.lengths[slot] == 0:  # nothing is known before the first position
                features[slot] = F.pad(features[slot], (0, 0, 1, 0))
        while far := [slot for slot in slots if len(features[slot]) > CHUNK]:
            rows = {slot: self._tail(tokens[slot], len(features[slot]))[:CHUNK] for slot in far}
            taken = Draft.committed_only(rows, device=cache.device)
            self._run(taken, None, torch.cat([features[slot][:CHUNK] for slot in far]), cache, chunk=True)
            cache.commit(taken.slots, [range(count) for count in taken.committed])
            features.update((slot, features[slot][CHUNK:]) for slot in far)
        rows = {slot: self._tail(tokens[slot], len(features[slot])) for slot in slots}
        own = Draft.committed_only(rows, device=cache.device)
        return own, self._run(own, None, torch.cat([features[slot] for slot in slots]), cache)

    @staticmethod
    def _tail(tokens: Sequence[int], count: int) -> Sequence[int]:
        return tokens[len(tokens) - count :]

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Keep the residuals of every position that was kept, also of prompt chunks."""
        normed = self.model.norm(passed.hidden)
        if verdict is None:
            paths = [(draft.slot == slot).nonzero()[:, 0] for slot in draft.slots]
        else:
            paths = [torch.tensor(path, device=normed.device) for path in verdict.paths]
        for slot, path in zip(draft.slots, paths, strict=True):
            self._pending.setdefault(slot, []).append(normed[path])

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Let the layer's own cache have room."""
        self.cache.extend(slots, stops)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Share the layer's entries, and copy what was not taken up."""
        super().fork(sources, targets)
        self.cache.fork(sources, targets)

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._pending.pop(slot, None)
        self.cache.release(slots)

    def saved(self) -> object:
        """Return the pending residuals and the state of the layer's cache."""
        return super().saved(), self.cache.saved()

    def restore(self, saved: object) -> None:
        """Set features and the drafter's own cache back to ``saved``."""
        assert isinstance(saved, tuple)
        super().restore(saved[0])
        self.cache.restore(saved[1])
