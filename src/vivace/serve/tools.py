"""The tools of a request: in which format the model writes calls, and what binds its answers to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.decode.request import Request
from vivace.serve.api_error import APIError
from vivace.serve.bodies import ChatBody
from vivace.serve.grammar import Bind, binds, binds_within
from vivace.serve.grammars import Grammars
from vivace.serve.tool_format import FORMATS, ToolFormat, format_of, grammar, rest_grammar
from vivace.serve.tool_reader import PYTHON_TAG, ToolReader


class Keeping(Tokenizer):
    """A tokenizer that leaves special tokens out, except those that begin tool calls."""

    def __init__(self, inner: Any, eos_ids: Sequence[int] = ()) -> None:
        super().__init__(inner, eos_ids)
        kept = {form.tag for form in FORMATS} | {PYTHON_TAG}
        special = zip(inner.all_special_ids, inner.all_special_tokens, strict=True)
        self._dropped = frozenset(index for index, text in special if text not in kept)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        kept = [index for index in ids if index not in self._dropped]
        text: str = self.inner.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class Tools:
    """Prepares requests whose answers may contain calls."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self.tokenizer = Keeping(tokenizer.inner, tokenizer.eos_ids)
        """Turns the tokens of answers into text in which calls can be found."""
        self._grammars = grammars

    def form(self) -> ToolFormat:
        """Return the format in which this model writes calls.

        Raises:
            APIError: it is none of the known ones.
        """
        form = format_of(str(self.tokenizer.inner.chat_template))
        if form is None:
            known = ", ".join(known.name for known in FORMATS)
            raise APIError(
                400,
                f"tools: the chat template of this model teaches a way to write calls that is none of {known}; "
                "leave them out",
                param="tools",
            )
        return form

    def bindings(self, body: ChatBody, owner: bytes) -> tuple[Bind, ...]:
        """Return what binds the answers to what the body says about its tools, if anything does.

        Args:
            body: of a request with tools.
            owner: whose request it is.

        Raises:
            APIError: the schema of a function cannot be kept to, or not without forcing a call.
        """
        form = self.form()
        if body.forced:
            return (self._forced(form, body, owner),)
        if body.is_strict:
            return (self._strict(form, body, owner),)
        return ()

    def ending(self, requests: Iterable[Request], form: ToolFormat, body: ChatBody) -> tuple[Request, ...]:
        """Return the same requests; their answers end after the first call where only one is allowed."""
        if body.forced or body.parallel_tool_calls or not form.close:
            return tuple(requests)
        ends = self._ends(form)
        return tuple(replace(request, stop=replace(request.stop, criterion=ends)) for request in requests)

    def _forced(self, form: ToolFormat, body: ChatBody, owner: bytes) -> Bind:
        """Return what binds an answer that consists of calls."""
        functions = [(function.name, function.schema_of_arguments) for function in body.forced]
        lark, trial = (
            grammar(form, functions, is_parallel=body.parallel_tool_calls, token_of=token_of)
            for token_of in (self._special_token, lambda _: None)
        )
        return binds(self._grammars.calls(lark, owner, trial=trial), "tools")

    def _strict(self, form: ToolFormat, body: ChatBody, owner: bytes) -> Bind:
        """Return what binds the calls of a model that need not make one; arguments of functions that are not strict are
        any object.
        """
        if not form.close:
            raise APIError(
                400,
                f"tools: strict needs a closing tag behind calls, which the {form.name} way has not; leave strict out, "
                "or force a call with tool_choice",
                param="tools",
            )
        functions = [tool.function for tool in body.tools]
        schemas = [(one.name, one.schema_of_arguments if one.strict else {"type": "object"}) for one in functions]
        return binds_within(self._grammars, self._grammars.calls(rest_grammar(form, schemas), owner), form)

    def _ends(self, form: ToolFormat) -> Callable[[Sequence[int]], bool]:
        """Return whether a call has just ended; its closing tag is a few tokens at most.

        The tag may also stand inside a text of the call's arguments, or where no call was made: that ends nothing.
        """

        def has_ended(tokens: Sequence[int]) -> bool:
            if form.close not in self.tokenizer.decode(tokens[-len(form.close) :]):
                return False
            reader = ToolReader(form, only_one=True)
            reader.push(self.tokenizer.decode(tokens))
            return bool(reader.calls) and not reader.is_cut

        return has_ended

    def _special_token(self, text: str) -> int | None:
        inner = self.tokenizer.inner
        found: int = inner.convert_tokens_to_ids(text)
        return found if found in inner.all_special_ids and inner.convert_ids_to_tokens(found) == text else None
