"""The bodies of OpenAI's API, as typed structs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = ["ChatRequest", "CompletionRequest", "EmbeddingRequest", "TextRequest"]

_MAX_CHOICES = 128

_Choices = Annotated[int, msgspec.Meta(ge=1, le=_MAX_CHOICES)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has beside its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM: with each chunk
    include_obfuscation: bool | None = None  # there is none


class TextRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of requests have in common. `ignore_eos` and `top_k` are those of vLLM."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: _Choices | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # What changes nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # What would have to be ignored, unless it asks for what is done in any case.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    repetition_penalty: float | None = None  # of vLLM, as the next two; load generators send 1
    min_p: float | None = None
    min_tokens: int | None = None

    def refuse(self, *names: str) -> None:
        """Raise :class:`UnsupportedError` if a field of `names`, or one that both kinds of requests
        have, asks for something that is not done.
        """
        common = "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "min_tokens"
        wrong = [name for name in (*names, *common) if getattr(self, name)]
        if self.ignore_eos and not self.stop:  # nothing ends it before
            wrong = [name for name in wrong if name != "min_tokens"]
        if self.repetition_penalty not in (None, 1):
            wrong.append("repetition_penalty")
        if self.stream_options is not None and not self.stream:
            wrong.append("stream_options without stream")
        for name in wrong:
            raise UnsupportedError(f"{name} is not supported: leave it out")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Part(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str = ""


class Message(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it.

        Raises:
            ArgumentError: it has no content.
            UnsupportedError: there is more in it than text.
        """
        if self.tool_calls or self.role in ("tool", "function"):
            raise UnsupportedError("tool calls are not supported: send messages of text")
        if self.content is None:
            raise ArgumentError(f"a message of role {self.role!r} has no content")
        text = self.content
        if not isinstance(text, str):
            other = next((one.type for one in text if one.type != "text"), None)
            if other is not None:
                raise UnsupportedError(
                    f"a message has a part of type {other!r}, and only text is read: images, sound "
                    "and files are not supported"
                )
            text = "".join(one.text for one in text)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(TextRequest, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None  # of tools, of which there are none
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raise :class:`UnsupportedError` if it asks for something that is not done."""
        if self.tools or self.functions:
            raise UnsupportedError("tools are not supported: leave out tools and functions")
        if (self.response_format or {}).get("type", "text") != "text":
            raise UnsupportedError("response_format is not supported but for the type 'text'")
        if (self.modalities or ["text"]) != ["text"]:
            raise UnsupportedError("modalities are not supported but for 'text'")
        self.refuse("audio", "prediction", "reasoning_effort", "web_search_options")

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are asked for; None if no log-probabilities are."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None


class CompletionRequest(TextRequest, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """Raise :class:`UnsupportedError` if it asks for something that is not done."""
        if self.best_of not in (None, self.n or 1):
            raise UnsupportedError("best_of is not supported: leave it out")
        self.refuse("echo", "suffix")

    @property
    def prompts(self) -> list[str | list[int]]:
        return texts_of("prompt", self.prompt)


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/v1/embeddings`."""

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    priority: int | None = None
    user: str | None = None  # changes nothing

    @property
    def inputs(self) -> list[str | list[int]]:
        return texts_of("input", self.input)


def texts_of(name: str, given: str | list[Any]) -> list[str | list[int]]:
    """Return what field `name` has: texts, or lists of tokens.

    Raises:
        ArgumentError: there are none, or they are neither.
    """
    found: list[Any] = [given] if isinstance(given, str) else given
    if found and _are_ids(found):
        return [found]
    if found and (all(isinstance(one, str) for one in found) or all(map(_are_ids, found))):
        return found
    raise ArgumentError(
        f"{name} must be a text, a list of texts, or one or several lists of token ids"
    )


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int for one in given)
