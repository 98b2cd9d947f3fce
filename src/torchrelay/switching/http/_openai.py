"""OpenAI's API for models that generate."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from torchrelay.errors import NotFoundError, TorchRelayError
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.generate._messages import Emitted
from torchrelay.switching.generate._prompts import TooLongError, ids_of, sampling_of
from torchrelay.switching.generate._stream import Token, TokenStream
from torchrelay.switching.http._embeddings import embeddings
from torchrelay.switching.http._messages import Request, Response, json_of
from torchrelay.switching.http._openai_schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TextRequest,
)
from torchrelay.switching.http._repository import Repository
from torchrelay.switching.http._schema import asked_of
from torchrelay.switching.models._store import StoredModel

__all__ = ["OpenAi", "error_of"]

_encode = msgspec.json.Encoder().encode
_COMPLETION_TOKENS = 16  # where a completion does not say how many
_STREAM = "text/event-stream; charset=utf-8"


def error_of(status: int, text: str, error: Exception) -> dict[str, Any]:
    """Return `error`, which `text` describes, as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    code = {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    if isinstance(error, TooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, NotFoundError):
        code = "model_not_found"
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


class _Choice:
    """One of the texts of an answer."""

    def __init__(self, index: int, stream: TokenStream) -> None:
        self.index = index
        self.stream = stream
        self.parts: list[str] = []
        self.tokens: list[Token] = []  # whose log-probabilities are to be written
        self.length = 0  # of the text so far
        self.made = 0  # tokens, up to a stop string

    @property
    def finish_reason(self) -> str | None:
        return self.stream.finish_reason or None


class _Answer:
    """The texts of one request, as they are generated."""

    def __init__(self, switcher: Switcher, asked: TextRequest, model: StoredModel) -> None:
        self.asked = asked
        self.model = model
        self.created = int(time.time())
        self.choices: list[_Choice] = []
        self._switcher = switcher
        self._events: asyncio.Queue[tuple[int, Emitted | Exception]] = asyncio.Queue()

    def start(self, prompts: list[tuple[int, ...]], default: int | None, top: int | None) -> None:
        """Start `n` sequences for each prompt.

        Args:
            default: how many tokens at most, where the request does not say; None: as many as fit.
            top: how many of the likeliest tokens to report; None: no log-probabilities.
        """
        asked = self.asked
        limit = getattr(asked, "max_completion_tokens", None)
        limit = asked.max_tokens if limit is None else limit
        for prompt in prompts:
            seed = secrets.randbits(62) if asked.seed is None else asked.seed
            sampling = sampling_of(
                self.model,
                len(prompt),
                max_tokens=limit,
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                top_k=max(0, asked.top_k or 0),  # vLLM's clients send -1 for all
                seed=seed,
                ignore_eos=bool(asked.ignore_eos),
                logprobs=top,
            )
            if limit is None and default is not None:
                sampling = sampling._replace(max_tokens=min(default, sampling.max_tokens))
            for draw in range(asked.n or 1):
                drawn = sampling._replace(seed=seed + draw)
                index, priority = len(self.choices), asked.priority or 0
                stream = self._switcher._continue(
                    self.model, prompt, drawn, asked.stops, priority, partial(self._put, index)
                )
                self.choices.append(_Choice(index, stream))

    def _put(self, index: int, event: Emitted | Exception) -> None:
        self._events.put_nowait((index, event))

    async def pieces(self) -> AsyncGenerator[tuple[_Choice, Token]]:
        """Yield each token, with the text that is certain with it, until all texts are complete."""
        left = len(self.choices)
        while left:
            index, event = await self._events.get()
            choice = self.choices[index]
            if choice.finish_reason is None:  # no stop string was found before
                token = choice.stream.take(event)
                choice.made += 1
                left -= choice.finish_reason is not None
                if token.logprob is not None:
                    choice.tokens.append(token)
                yield choice, token

    def close(self) -> None:
        """End what has not ended."""
        for choice in self.choices:
            choice.stream.close()

    @property
    def usage(self) -> dict[str, Any]:
        prompts = self.choices[:: self.asked.n or 1]  # of the choices of one prompt it counts once
        prompt = sum(one.stream.prompt_tokens for one in prompts)
        made = sum(one.made for one in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "recomputed_tokens": sum(one.stream.recomputed_tokens for one in self.choices),
        }


class OpenAi:
    """One method for each path."""

    def __init__(self, switcher: Switcher, repository: Repository) -> None:
        self._switcher = switcher
        self._repository = repository

    async def models(self, _: Request) -> Response:
        """List the models."""
        names = self._repository.names()
        return json_of({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, _: Request, name: str) -> Response:
        """Return whether a model is resident, stashed or cold."""
        self._check(name)
        return json_of(self._model(name))

    def _check(self, name: str) -> None:
        if name not in self._repository.names():
            raise NotFoundError(f"there is no model {name!r}")

    def _model(self, name: str) -> dict[str, Any]:
        """Describe a model: its state is that of its weights."""
        model, state = self._switcher.stored(name), "cold"
        if model is not None:
            state = "resident" if self._switcher.is_resident(name) else "stashed"
        length = None
        if model is not None and model.generating is not None:
            length = model.generating.max_context
        elif model is not None and model.encoding is not None:
            length = model.encoding.max_tokens
        about = {"id": name, "object": "model", "created": 0, "owned_by": "torchrelay"}
        return {**about, "state": state, "max_model_len": length}

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        asked = await asked_of(request, ChatRequest)
        asked.check()
        messages = [one.plain() for one in asked.messages]

        def prompts(model: StoredModel) -> list[tuple[int, ...]]:
            return [tuple(model.tokenizer.chat(messages))]

        return await self._answer(asked, prompts, None, asked.alternatives, _Chat())

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        asked = await asked_of(request, CompletionRequest)
        asked.check()
        given = asked.prompts

        def prompts(model: StoredModel) -> list[tuple[int, ...]]:
            return [ids_of(model, one) for one in given]

        limit = _COMPLETION_TOKENS
        return await self._answer(asked, prompts, limit, asked.logprobs, _Completion())

    async def embeddings(self, request: Request) -> Response:
        """Return vectors of texts."""
        asked = await asked_of(request, EmbeddingRequest)
        self._check(asked.model)
        with self._repository.using(asked.model):
            model = await self._prepared(asked.model)
            return json_of(await embeddings(self._switcher, model, asked))

    async def _prepared(self, name: str) -> StoredModel:
        """Return the model, loaded if its requests load it."""
        await self._repository.prepare(name, None)
        model = self._switcher.stored(name)
        if model is None:
            raise NotFoundError(f"model {name!r} is not loaded")
        return model

    async def _answer(
        self,
        asked: TextRequest,
        prompts: Callable[[StoredModel], list[tuple[int, ...]]],
        limit: int | None,
        top: int | None,
        form: _Form,
    ) -> Response:
        name = asked.model
        self._check(name)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._repository.using(name))
            model = await self._prepared(name)
            # A long text takes a while.
            found = await asyncio.to_thread(prompts, model)
            answer = _Answer(self._switcher, asked, model)
            undo.callback(answer.close)
            answer.start(found, limit, top)
            if not asked.stream:
                async for choice, token in answer.pieces():
                    choice.parts.append(token.text)
                return json_of(form.whole(answer))
            end = undo.pop_all().close
        headers = {"Cache-Control": "no-cache"}
        chunks = self._chunks(answer, form)
        return Response(b"", content_type=_STREAM, headers=headers, stream=chunks, on_end=end)

    async def _chunks(self, answer: _Answer, form: _Form) -> AsyncGenerator[bytes]:
        """Yield the events of a stream."""
        options = answer.asked.stream_options
        has_usage = options is not None and bool(options.include_usage)
        is_usage_continuous = has_usage and bool(options and options.continuous_usage_stats)
        try:
            for choice in answer.choices:
                for first in form.first(answer, choice):
                    yield _event(first)
            async for choice, token in answer.pieces():
                if token.text or choice.tokens or choice.finish_reason:
                    chunk = form.chunk(answer, choice, token.text)
                    yield _event(chunk | ({"usage": answer.usage} if is_usage_continuous else {}))
                    choice.tokens.clear()
            if has_usage:
                yield _event(
                    {**form.head(answer, is_chunk=True), "choices": [], "usage": answer.usage}
                )
            yield b"data: [DONE]\n\n"
        except TorchRelayError as error:
            yield _event(error_of(500, str(error), error))


class _Form:
    """How one of the two kinds of answers is written."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self) -> None:
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"

    def head(self, answer: _Answer, *, is_chunk: bool = False) -> dict[str, Any]:
        kind = self.chunk_kind if is_chunk else self.kind
        about = {"id": self._id, "object": kind, "created": answer.created}
        return {**about, "model": answer.model.name}

    def whole(self, answer: _Answer) -> dict[str, Any]:
        choices = [self._choice(answer, one, "".join(one.parts), False) for one in answer.choices]
        return {**self.head(answer), "choices": choices, "usage": answer.usage}

    def chunk(self, answer: _Answer, choice: _Choice, text: str) -> dict[str, Any]:
        choices = [self._choice(answer, choice, text, True)]
        return {**self.head(answer, is_chunk=True), "choices": choices}

    def first(self, answer: _Answer, choice: _Choice) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    def _choice(
        self, answer: _Answer, choice: _Choice, text: str, is_chunk: bool
    ) -> dict[str, Any]:
        has_logprobs = choice.stream._sequence.sampling.logprobs >= 0
        return {
            "index": choice.index,
            **self.content(text, is_chunk),
            "logprobs": self.logprobs(answer.model, choice) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def content(self, text: str, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, model: StoredModel, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class _Chat(_Form):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, answer: _Answer, choice: _Choice) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        one = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self.head(answer, is_chunk=True), "choices": [one]}]

    def content(self, text: str, is_chunk: bool) -> dict[str, Any]:
        if is_chunk:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, model: StoredModel, choice: _Choice) -> dict[str, Any]:
        content = [
            {
                **_token(model, one.id, one.logprob),
                "top_logprobs": [_token(model, *other) for other in one.top_logprobs],
            }
            for one in choice.tokens
        ]
        return {"content": content, "refusal": None}


class _Completion(_Form):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def content(self, text: str, is_chunk: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, model: StoredModel, choice: _Choice) -> dict[str, Any]:
        texts = [_text_of(model, one.id) for one in choice.tokens]
        *offsets, choice.length = accumulate(map(len, texts), initial=choice.length)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in choice.tokens],
            # Of tokens with one text, as parts of characters have, the likeliest counts.
            "top_logprobs": [
                {_text_of(model, other): value for other, value in reversed(one.top_logprobs)}
                for one in choice.tokens
            ],
            "text_offset": offsets,
        }


def _token(model: StoredModel, token: int, logprob: float | None) -> dict[str, Any]:
    text, tokenizer = _text_of(model, token), model.language.tokenizer
    found = text.encode() if tokenizer is None else tokenizer.bytes_of(token)
    return {"token": text, "logprob": logprob, "bytes": [*found]}


def _text_of(model: StoredModel, token: int) -> str:
    tokenizer = model.language.tokenizer
    return f"token_id:{token}" if tokenizer is None else tokenizer.text_of(token)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
