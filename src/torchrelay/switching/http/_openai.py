"""OpenAI's API for models that generate."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import msgspec

from torchrelay.errors import NotFoundError, TorchRelayError
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.generate._messages import Emitted
from torchrelay.switching.generate._prompts import TooLongError, ids_of, sampling_of, text_after
from torchrelay.switching.generate._sequences import Sequence
from torchrelay.switching.generate._text import TextStream
from torchrelay.switching.http._embeddings import embeddings
from torchrelay.switching.http._messages import Limits, Request, Response, json_of
from torchrelay.switching.http._openai_schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TextRequest,
)
from torchrelay.switching.http._repository import Repository
from torchrelay.switching.http._schema import parse
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

    def __init__(self, index: int, sequence: Sequence, text: TextStream) -> None:
        self.index = index
        self.sequence = sequence
        self.text = text
        self.finish_reason: str | None = None
        self.parts: list[str] = []
        self.logprobs: list[tuple[str, Emitted]] = []  # with the text of each token
        self.length = 0  # of the text so far


class _Answer:
    """The texts of one request, as they are generated."""

    def __init__(self, switcher: Switcher, asked: TextRequest, model: StoredModel) -> None:
        self.asked = asked
        self.model = model
        self.created = int(time.time())
        self.choices: list[_Choice] = []
        self._switcher = switcher
        self._events: asyncio.Queue[tuple[_Choice, Emitted | Exception]] = asyncio.Queue()

    def start(self, prompts: list[tuple[int, ...]], default: int | None, top: int | None) -> None:
        """Start `n` sequences for each prompt.

        Args:
            default: how many tokens, where the request does not say; None: as many as fit.
            top: how many of the likeliest tokens to report; None: no log-probabilities.
        """
        asked = self.asked
        limits = getattr(asked, "max_completion_tokens", None), asked.max_tokens, default
        limit = next((one for one in limits if one is not None), None)
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        for prompt in prompts:
            for draw in range(asked.n or 1):
                sampling = sampling_of(
                    self.model,
                    len(prompt),
                    max_tokens=limit,
                    temperature=1.0 if asked.temperature is None else asked.temperature,
                    top_p=1.0 if asked.top_p is None else asked.top_p,
                    top_k=max(0, asked.top_k or 0),  # vLLM's clients send -1 for all
                    seed=seed + draw,
                    ignore_eos=bool(asked.ignore_eos),
                    logprobs=top,
                )
                text = text_after(self.model, asked.stops)
                sequence = Sequence(
                    self.model.name, prompt, sampling, lambda _: None, asked.priority or 0
                )
                choice = _Choice(len(self.choices), sequence, text)
                sequence.on_event = partial(self._put, choice)
                self._switcher._begin(sequence)
                self.choices.append(choice)

    def _put(self, choice: _Choice, event: Emitted | Exception) -> None:
        self._events.put_nowait((choice, event))

    async def pieces(self) -> AsyncGenerator[tuple[_Choice, str, Emitted]]:
        """Yield each token, with the text that is certain with it, until all texts are complete."""
        left = len(self.choices)
        while left:
            choice, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if choice.finish_reason is not None:  # a stop string was found before
                continue
            text = choice.text.add(event.token, is_last=bool(event.finished))
            if choice.text.is_stopped and not event.finished:
                self._switcher._end_sequence(choice.sequence)
            choice.finish_reason = "stop" if choice.text.is_stopped else event.finished or None
            left -= choice.finish_reason is not None
            yield choice, text, event

    def close(self) -> None:
        """End what has not ended."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._switcher._end_sequence(choice.sequence)

    @property
    def usage(self) -> dict[str, Any]:
        prompts = self.choices[:: self.asked.n or 1]  # of the choices of one prompt it counts once
        prompt = sum(len(one.sequence.prompt) for one in prompts)
        made = sum(len(one.sequence.tokens) for one in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "recomputed_tokens": sum(one.sequence.recomputed for one in self.choices),
        }


class OpenAi:
    """One method for each path."""

    def __init__(self, switcher: Switcher, repository: Repository, limits: Limits) -> None:
        self._switcher = switcher
        self._repository = repository
        self._limits = limits

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
        asked, _ = parse(ChatRequest, await request.body(self._limits), None)
        asked.check()
        messages = [one.plain() for one in asked.messages]

        def prompts(model: StoredModel) -> list[tuple[int, ...]]:
            known = model.generating
            return [() if known is None else tuple(known.text(model.name).chat(messages))]

        return await self._answer(asked, prompts, None, asked.alternatives, _Chat())

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        asked, _ = parse(CompletionRequest, await request.body(self._limits), None)
        asked.check()
        given = asked.prompts

        def prompts(model: StoredModel) -> list[tuple[int, ...]]:
            return [ids_of(model, one) for one in given]

        limit = _COMPLETION_TOKENS
        return await self._answer(asked, prompts, limit, asked.logprobs, _Completion())

    async def embeddings(self, request: Request) -> Response:
        """Return vectors of texts."""
        asked, _ = parse(EmbeddingRequest, await request.body(self._limits), None)
        self._check(asked.model)
        self._repository.started(asked.model)
        try:
            model = await self._prepared(asked.model)
            return json_of(await embeddings(self._switcher, model, asked))
        finally:
            self._repository.ended(asked.model)

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
        self._repository.started(name)
        try:
            model = await self._prepared(name)
            # A long text takes a while.
            found = await asyncio.to_thread(prompts, model)
            answer = _Answer(self._switcher, asked, model)
            try:
                answer.start(found, limit, top)
                if not asked.stream:
                    async for choice, text, event in answer.pieces():
                        choice.parts.append(text)
                        form.note(choice, model, event, text)
                    return json_of(form.whole(answer))
            except BaseException:
                answer.close()
                raise
        except BaseException:
            self._repository.ended(name)
            raise
        finally:
            if not asked.stream:
                self._repository.ended(name)

        def end() -> None:
            answer.close()
            self._repository.ended(name)

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
            async for choice, text, event in answer.pieces():
                form.note(choice, answer.model, event, text)
                if text or choice.logprobs or choice.finish_reason:
                    chunk = form.chunk(answer, choice, text)
                    yield _event(chunk | ({"usage": answer.usage} if is_usage_continuous else {}))
                    choice.logprobs.clear()
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
        return {
            "id": self._id,
            "object": kind,
            "created": answer.created,
            "model": answer.model.name,
        }

    def note(self, choice: _Choice, model: StoredModel, event: Emitted, text: str) -> None:
        """Keep the log-probabilities of a token, if they are asked for."""
        if choice.sequence.sampling.logprobs >= 0:
            choice.logprobs.append((_text_of(model, event.token), event))

    def whole(self, answer: _Answer) -> dict[str, Any]:
        choices = [self.choice(answer, one, "".join(one.parts), False) for one in answer.choices]
        return {**self.head(answer), "choices": choices, "usage": answer.usage}

    def chunk(self, answer: _Answer, choice: _Choice, text: str) -> dict[str, Any]:
        choices = [self.choice(answer, choice, text, True)]
        return {**self.head(answer, is_chunk=True), "choices": choices}

    def first(self, answer: _Answer, choice: _Choice) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        return []

    def choice(self, answer: _Answer, choice: _Choice, text: str, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError


class _Chat(_Form):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def first(self, answer: _Answer, choice: _Choice) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        one = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self.head(answer, is_chunk=True), "choices": [one]}]

    def choice(self, answer: _Answer, choice: _Choice, text: str, is_chunk: bool) -> dict[str, Any]:
        logprobs = None
        if choice.sequence.sampling.logprobs >= 0:
            content = [
                {
                    **_token(answer.model, event.token, event.logprob),
                    "top_logprobs": [_token(answer.model, *one) for one in event.top],
                }
                for _, event in choice.logprobs
            ]
            logprobs = {"content": content, "refusal": None}
        if is_chunk:
            said: dict[str, Any] = {"delta": {"content": text} if text else {}}
        else:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {
            "index": choice.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


class _Completion(_Form):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, answer: _Answer, choice: _Choice, text: str, is_chunk: bool) -> dict[str, Any]:
        logprobs = None
        if choice.sequence.sampling.logprobs >= 0:
            offsets = []
            for token, _ in choice.logprobs:
                offsets.append(choice.length)
                choice.length += len(token)
            logprobs = {
                "tokens": [token for token, _ in choice.logprobs],
                "token_logprobs": [event.logprob for _, event in choice.logprobs],
                # Of tokens with one text, as parts of characters have, the likeliest counts.
                "top_logprobs": [
                    {_text_of(answer.model, one): value for one, value in reversed(event.top)}
                    for _, event in choice.logprobs
                ],
                "text_offset": offsets,
            }
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


def _token(model: StoredModel, token: int, logprob: float) -> dict[str, Any]:
    known, text = model.generating, _text_of(model, token)
    has_text = known is not None and known.tokenizer is not None
    found = known.text(model.name).bytes_of(token) if known and has_text else text.encode()
    return {"token": text, "logprob": logprob, "bytes": [*found]}


def _text_of(model: StoredModel, token: int) -> str:
    known = model.generating
    has_text = known is not None and known.tokenizer is not None
    return known.text(model.name).text_of(token) if known and has_text else f"token_id:{token}"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
