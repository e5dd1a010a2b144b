"""The fields of requests: each of them has an effect, and every other field is refused by name.

The tables of ``docs/serving.md`` are written from these classes. A field whose value is null, or asks for what happens
anyway (``foreign.py``), counts as left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from vivace.core.sampling import DRAWS
from vivace.decode.beams import MAX_BEAMS
from vivace.serve.body_parts import (
    FIRST,
    Function,
    Message,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StrictModel,
    Tool,
)
from vivace.serve.foreign import without_neutral

MAX_CHOICES = 16
"""Largest ``n``."""
MAX_TOP = 20
"""Largest ``top_logprobs``."""
MAX_STOPS = 16
MAX_PROMPTS = 64
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], FIRST]
PromptTexts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
PromptTokens = Annotated[list[Tokens], Field(max_length=MAX_PROMPTS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(StrictModel):
    """The fields that every request body may have."""


def _first_wrong(bias: Any) -> Any:
    """Return only the first value that is out of range, which is enough to refuse the body; without one, all values."""
    if not isinstance(bias, dict):
        return bias
    for name, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            return {name: value}
    return bias


class GenerationBody(Body):
    """Fields that chats and completions share."""

    model: str | None = Field(None, description="The base model's name, or an adapter's; left out: the base model.")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 takes the likeliest token; left out: the checkpoint's, else 0."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Draw from the smallest set of tokens with this probability."
    )
    top_k: int | None = Field(None, ge=-1, description="Draw from the k likeliest tokens; 0 and -1 mean all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Draw from tokens at least this fraction as likely as the likeliest."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="Divides positive logits of tokens in prompt and answer, multiplies negative ones."
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens in the answer so far."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted as often as the token has occurred in the answer."
    )
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_first_wrong)] = Field(
        {}, description="Added to the logits of token ids."
    )
    min_tokens: int | None = Field(None, ge=0, description="Least tokens before an end; left out: the model's own.")
    ignore_eos: bool = Field(False, description="Continue after the end of text, up to the limit.")
    stop: StopText | Annotated[list[StopText], FIRST] | None = Field(
        None, description="Text, or up to 16 texts, before which the answer ends."
    )
    stop_token_ids: list[Token] = Field(
        [], max_length=256, fail_fast=True, description="Tokens at which the answer ends."
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Number of choices; choice i is drawn with seed + i.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="The same seed gives the same text (`auto`: docs/losslessness.md); left out, or -1: a new one.",
    )
    stream: bool = Field(
        False, description="Send server-sent events; tokens that are accepted together are in one event."
    )
    stream_options: StreamOptions | None = Field(None, description="`include_usage`, `continuous_usage_stats`.")
    response_format: ResponseFormat | None = Field(
        None, description="`json_object` or `json_schema`: the answer conforms to it, drafts included."
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    return_token_ids: bool = Field(False, description="Adds `prompt_token_ids` and each choice's `token_ids`.")
    return_progress: bool = Field(
        False, description="With `stream`: adds chunks with `prompt_progress` while the prompt is read."
    )
    return_trace: bool = Field(
        False, description="Adds each token's step and what was drafted for its position (`trace`)."
    )
    method: str | None = Field(None, description="Decoding method by its name in vivace; left out: the server's.")
    num_draft_tokens: int | None = Field(None, ge=1, le=16, description="Guesses per step, for methods that take it.")
    quality: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Agreement of early exits with the whole model, for method dynamic: one of its adapter's.",
    )
    prefill: str | None = Field(
        None, description="How the prompt is read; lossy with anything but full. Left out: the server's."
    )
    keep: str | None = Field(None, max_length=200, description="How many prompt tokens go on, for such a `prefill`.")
    min_prompt: int | None = Field(None, ge=1, description="Shortest prompt of which tokens are left out.")
    decode_keep: float | Annotated[str, Field(max_length=200)] | None = Field(
        None,
        description='Share of the tokens that each new token reads, while those left out may come back; or "same".',
    )
    priority: int = Field(0, ge=-1000, le=1000, description="Requests with lower values leave the queue first.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Prompt entries are shared only with requests of the same API key that have the same salt.",
    )
    user: str | None = Field(None, description="Written to the server's log.")
    safety_identifier: str | None = Field(None, description="Written to the server's log; newer name of `user`.")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        return without_neutral(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationBody:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} texts; at most {MAX_STOPS}")
        if not self.stream:
            asked = {"stream_options": any(self.options.model_dump().values()), "return_progress": self.return_progress}
            for name in [name for name, is_asked in asked.items() if is_asked]:
                raise ValueError(f"{name} has an effect only with stream")
        if self.is_bound:
            ends = ("ignore_eos", "min_tokens", "stop", "stop_token_ids")
            for name in [name for name in ends if getattr(self, name)]:
                raise ValueError(f"{name} excludes a schema: an answer that is bound to one ends where the schema does")
        return self

    @property
    def is_bound(self) -> bool:
        """Return whether the whole answer has to fit a grammar."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def draw_fields(self) -> list[str]:
        """Names of the given fields because of which tokens are drawn; none where the likeliest are taken."""
        return [] if self.temperature == 0 else [name for name in DRAWS if getattr(self, name) is not None]

    @property
    def num_texts(self) -> int:
        """How many texts are written for a prompt, each with tokens of its own: ``n``, but one search finds several."""
        return self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a list, however ``stop`` was written."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def options(self) -> StreamOptions:
        """``stream_options``, or what they are when left out."""
        return self.stream_options or StreamOptions()


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(
        min_length=1, fail_fast=True, description="The conversation; content is text, or parts of type text."
    )
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest answer; left out: the server's or checkpoint's limit, else the rest of the context.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Older name of `max_completion_tokens`.")
    logprobs: bool = Field(False, description="log p of every token under the model, before penalties and temperature.")
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP, description="Number of likeliest tokens returned for each position.")
    tools: list[Tool] = Field(
        [],
        max_length=128,
        fail_fast=True,
        description="Functions that the model may call (`tool_calls`); refused if its template has no known format.",
    )
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = Field(
        None, description="`required`, or a function: the answer is calls whose arguments fit their schema."
    )
    parallel_tool_calls: bool = Field(True, description="With false, at most one call.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Passed to the chat template; refused where it does not use them."
    )
    continue_final_message: bool = Field(False, description="The answer continues the last message.")

    @model_validator(mode="after")
    def _chat_fits_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        self._tools_fit_together()
        return self

    def _tools_fit_together(self) -> None:
        names = [tool.function.name for tool in self.tools]
        for field in ("tool_choice", "parallel_tool_calls"):
            if field in self.model_fields_set and not names:
                raise ValueError(f"{field} needs tools")
        if len(set(names)) < len(names):
            raise ValueError("tools has two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name[:100]!r}, which is not among the tools"
            )
        if self.forced and self.response_format is not None:
            raise ValueError("response_format and a tool_choice that forces a call exclude each other")

    @property
    def is_bound(self) -> bool:
        """Return whether the whole answer has to fit a grammar, calls of tools among them."""
        return super().is_bound or bool(self.forced)

    @property
    def is_strict(self) -> bool:
        """Return whether calls that the model is free to make have to fit their schemas."""
        return self.reads_calls and any(tool.function.strict for tool in self.tools)

    @property
    def reads_calls(self) -> bool:
        """Return whether the answer may hold calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced(self) -> list[Function]:
        """Functions one of which has to be called; none when the model is free."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool.function for tool in self.tools if tool.function.name == name]
        return [tool.function for tool in self.tools] if self.tool_choice == "required" else []

    @property
    def limit(self) -> int | None:
        """Largest number of new tokens that was asked for; None leaves it to the server."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: str | PromptTexts | Tokens | PromptTokens = Field(
        description="Text, texts, token ids, or lists of them; used unchanged, without the chat template."
    )
    max_tokens: int | None = Field(
        None, ge=0, description="Longest answer; 0 needs `echo`; left out: as in chats (OpenAI stops after 16)."
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP, description="log p of every token, and of so many likeliest tokens."
    )
    echo: bool = Field(False, description="The answer begins with the prompt; with `logprobs` the prompt is scored.")
    use_beam_search: bool = Field(
        False, description="The choices are the `n` likeliest texts, by beam search with `best_of` beams."
    )
    best_of: int | None = Field(None, ge=2, le=MAX_BEAMS, description="Number of beams; left out: `n`.")
    length_penalty: float | None = Field(
        None, ge=-100, le=100, description="With beams: log p of a text is divided by its length to this power."
    )
    early_stopping: bool | Literal["never"] | None = Field(None, description="With beams: when a search ends.")

    @model_validator(mode="after")
    def _beams_fit_together(self) -> CompletionBody:
        if not self.use_beam_search:
            for name in [name for name in ("length_penalty", "early_stopping") if getattr(self, name) is not None]:
                raise ValueError(f"{name} has an effect only with use_beam_search")
            if self.best_of is not None:
                raise ValueError("best_of is the number of beams; without use_beam_search request n choices")
            return self
        if self.num_beams < max(2, self.n):
            raise ValueError(f"beam search for {self.n} choices needs best_of of at least {max(2, self.n)}")
        for name in self.draw_fields:
            raise ValueError(f"{name} draws tokens, and use_beam_search takes the likeliest texts; leave out one")
        asked = ("logprobs", "method", "num_draft_tokens", "quality")
        wrong = [name for name in asked if getattr(self, name) is not None]
        wrong += ["return_trace"] * self.return_trace + ["response_format"] * self.is_bound
        for name in wrong:
            raise ValueError(f"{name} is about single texts, of which beam search has several; leave out one of them")
        return self

    @property
    def num_beams(self) -> int:
        """Number of beams, 1 without a search."""
        return (self.best_of or self.n) if self.use_beam_search else 1

    @property
    def num_texts(self) -> int:
        """How many texts are written for a prompt; the choices of a search are one, as far as they agree."""
        return 1 if self.use_beam_search else self.n

    @model_validator(mode="after")
    def _completion_fits_together(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0 and echo is off: there is nothing to answer")
        if not self.prompts:
            raise ValueError("prompt is an empty list; give at least one prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)  # type: ignore[arg-type]


class TokenizeBody(Body):
    """Body of ``POST /tokenize``."""

    model: str | None = None
    prompt: str | None = Field(None, description="A text; or `messages`.")
    messages: Annotated[list[Message], FIRST] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeBody(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Token] = Field(max_length=1 << 20, fail_fast=True)


class LoadLoraBody(Body):
    """Body of ``POST /v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=100, description="What `model` shall be to wear it.")
    lora_path: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="Name of the adapter inside the server's folder; left out: `lora_name`.",
    )


class ModerationBody(Body):
    """Body of ``POST /v1/moderations``."""

    model: str | None = Field(None, description="The base model's name; left out: that.")
    input: Annotated[str, Field(min_length=1)] | PromptTexts = Field(description="A text, or several.")


class UnloadLoraBody(Body):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=100, description="An adapter that is served.")
