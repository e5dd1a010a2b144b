"""What several gates would give a draft: ``python -m benchmarks.gates --runs DIR --json FILE``.

``benchmarks.ablation train --set shapes`` makes accelerated residuals for gates after several layers. Here they all
guess every token of the model's own answers to other prompts, and drafting is replayed on what they guessed: a guess is
taken at the first gate that is sure of it, else at the last, and a draft ends below a guess of which no gate is sure.
That is what a router at each gate would do. Thresholds and lengths are those that are best on every second answer; what
is shown is of the others.

Speeds are those of bytes (``vivace.evaluate.speed_law``): a guess after k of N layers in q4 reads .3 k/N of the
layers' bytes and half of the head's, a pass that verifies reads all. *Known* is the bound for any router: of two gates
the higher one guesses only what the lower one has wrong, and a draft ends before a guess that neither has right and
before the last token of an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, cast

import torch

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.cli.prompting import questions_of, read_prompts
from vivace.core.draft_head import DraftHead
from vivace.engine import Engine
from vivace.evaluate.provenance import provenance
from vivace.evaluate.speed_law import ModelShape, head_share
from vivace.methods.multirate.objective import MultirateLoss, MultirateObjective
from vivace.train.data import TokenBatch
from vivace.train.distillation import FrozenPass

LENGTHS = (1, 2, 3, 4, 5, 6, 8)
SURE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Least probability of a guess that is taken at a gate below the last, and of one below which a draft goes on."""


@dataclass(frozen=True)
class Guessed:
    """What one gate guesses for the tokens of one answer."""

    right: Sequence[bool]
    """Whether the guess is the token that the model writes."""
    sure: Sequence[float]
    """Its probability at the gate."""


@dataclass(frozen=True)
class Policy:
    """How a draft is made."""

    gates: tuple[int, ...]
    """Layers below each gate, ascending."""
    longest: int
    """Most guesses of a draft."""
    taken: float
    """A gate below the last hands a guess on that is less likely than this."""
    ends: float
    """Nothing is drafted below a guess that is less likely than this at the gate where it is taken."""


@dataclass(frozen=True)
class Replayed:
    """Sums over the steps of some answers."""

    steps: int
    tokens: int
    guesses: int
    read: float
    """Passes of bytes that were read."""

    @property
    def gain(self) -> float:
        """Return tokens by bytes, beside plain decoding."""
        return self.tokens / self.read


def replay(answers: Iterable[Mapping[int, Guessed]], policy: Policy, shares: Mapping[int, float]) -> Replayed:
    """Return what drafting by a policy costs and gives on answers.

    Args:
        answers: by gate, what is guessed for each token of an answer. Behind a wrong guess of a draft the guesses for
            the right text stand for those that would be made.
        policy: how a draft is made.
        shares: by gate, the share of a pass that a guess there reads.
    """
    steps = tokens = guesses = 0
    read = 0.0
    *early, last = policy.gates
    for answer in answers:
        at, length = 0, len(answer[last].right)
        while at < length:
            kept, is_right = 0, True
            for place in range(at, min(at + policy.longest, length)):
                gate = next((gate for gate in early if answer[gate].sure[place] >= policy.taken), last)
                guesses, read = guesses + 1, read + shares[gate]
                is_right = is_right and answer[gate].right[place]
                kept += is_right
                if answer[gate].sure[place] < policy.ends:
                    break
            steps, read, at = steps + 1, read + 1.0, at + kept + 1
        tokens += length
    return Replayed(steps, tokens, guesses, read)


def known(
    answers: Iterable[Mapping[int, Guessed]], gates: tuple[int, ...], shares: Mapping[int, float], longest: int
) -> Replayed:
    """Return what a router would give that knows which gates are right: see `replay`."""
    steps = tokens = guesses = 0
    read = 0.0
    for answer in answers:
        at, length = 0, len(answer[gates[-1]].right)
        while at < length:
            kept = 0
            for place in range(at, min(at + longest, length - 1)):  # the last token comes with a pass in any case
                gate = next((gate for gate in gates if answer[gate].right[place]), None)
                if gate is None:
                    break
                kept, guesses, read = kept + 1, guesses + 1, read + shares[gate]
            steps, read, at = steps + 1, read + 1.0, at + kept + 1
        tokens += length
    return Replayed(steps, tokens, guesses, read)


def best_policy(
    answers: Sequence[Mapping[int, Guessed]], gates: tuple[int, ...], shares: Mapping[int, float]
) -> Policy:
    """Return the policy with these gates that reads the fewest bytes a token."""
    taken = SURE if len(gates) > 1 else (0.0,)
    policies = [Policy(gates, *chosen) for chosen in product(LENGTHS, taken, SURE)]
    return max(policies, key=lambda policy: replay(answers, policy, shares).gain)


@torch.no_grad()
def guessed(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> Guessed:
    """Return what an engine's accelerated residual guesses for each token of an answer.

    The last verified position is drawn as in training (``methods/multirate/objective.py``).
    """
    model, (weights, _) = engine.model, engine.methods.trained("multirate")
    tokens = torch.tensor([[*prompt, *answer]], device=model.device)
    scored = torch.arange(tokens.shape[1], device=model.device)[None] >= len(prompt)
    batch, objective = TokenBatch(tokens, scored), MultirateObjective(weights, MultirateLoss())
    top = objective.accelerate(model, tokens, FrozenPass.of(model, tokens))[batch.predicting]
    sure, token = DraftHead(model).among(top).softmax(-1).max(-1)
    return Guessed((token == batch.targets).tolist(), sure.tolist())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the table's rows by set of prompts."""
    runs = {int(path.name.rpartition(" ")[2]): path for path in given.runs.glob("exit layer *")}
    if not runs:
        raise SystemExit(f"{given.runs} has no folder 'exit layer K': make them with benchmarks.ablation --set shapes")
    engines = {
        gate: vivace.load(given.model, kernels="torch", adapters={"multirate": runs[gate]}) for gate in sorted(runs)
    }
    plain, config = vivace.load(given.model), next(iter(engines.values())).model.config
    head = head_share(config.width, config.ffn_width, config.num_layers, config.vocab_size)
    shares = {gate: ModelShape(gate, config.num_layers, head, 0.05, 0.3, 0.5).guess_share for gate in engines}
    report = []
    for prompts in given.prompts:
        answers = []
        for question in questions_of(plain, read_prompts(prompts, given.limit), raw=False):
            found = plain.generate([list(question.token_ids)], max_new_tokens=given.max_new_tokens, method="plain")[0]
            torch.manual_seed(0)
            answers.append(
                {gate: guessed(engine, question.token_ids, found.token_ids) for gate, engine in engines.items()}
            )
        report.append({"prompts": Path(prompts).stem, "num_prompts": len(answers), "rows": _rows(answers, shares)})
    return {
        "provenance": asdict(provenance(plain.model.device)),
        "model": plain.folder.name,
        "layers": config.num_layers,
        "shares": shares,
        "report": report,
    }


def _rows(answers: Sequence[Mapping[int, Guessed]], shares: Mapping[int, float]) -> list[dict[str, Any]]:
    chosen_from, shown = answers[::2], answers[1::2]
    rows = []
    gates = sorted(shares)
    for which in (*((gate,) for gate in gates), *combinations(gates, 2)):
        policy = best_policy(chosen_from, which, shares)
        bound = max((known(shown, which, shares, longest) for longest in LENGTHS), key=lambda found: found.gain)
        right = [
            any(answer[gate].right[place] for gate in which)
            for answer in shown
            for place in range(len(answer[which[0]].right))
        ]
        rows.append(
            {
                "policy": asdict(policy),
                "agreement": sum(right) / len(right),
                "replayed": asdict(replay(shown, policy, shares)),
                "known": asdict(bound),
            }
        )
    return rows


def tables(folder: Path) -> str:
    """Return the tables of all files that ``measure`` wrote into a folder."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    parts = []
    for part in written["report"]:
        rows = []
        for row in part["rows"]:
            policy, found = Policy(**row["policy"]), Replayed(**row["replayed"])
            rows.append(
                (
                    " or ".join(map(str, policy.gates)),
                    f"{row['agreement']:.2f}",
                    _spoken(policy),
                    f"{found.guesses / found.steps:.2f}",
                    f"{found.tokens / found.steps:.2f}",
                    f"{found.gain:.2f}x",
                    f"{Replayed(**row['known']).gain:.2f}x",
                )
            )
        columns = ("gate after layer", "some gate right", "draft", "guesses", "tokens a pass", "by bytes", "known")
        caption = (
            f"**{written['model']}, {part['prompts']}**: {part['num_prompts'] // 2} answers, gates of "
            f"{written['layers']} layers, {captions.tree(written['provenance'])}; replayed, not timed."
        )
        parts += [caption, table(columns, rows)]
    return parts


def _spoken(policy: Policy) -> str:
    taken = f", there from {policy.taken:g}" if len(policy.gates) > 1 else ""
    return f"up to {policy.longest}{taken}, on from {policy.ends:g}"


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folders 'exit layer K' of the ablation")
    parser.add_argument("--model", help="the model that ships, if left out")
    parser.add_argument("--prompts", nargs="*", default=["e2e", "sql"])
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    report = measure(given)
    write_report(given.json, report)
    print("\n\n".join(_tables(cast(Any, report))))


if __name__ == "__main__":
    main()
