"""OpenAI's API, called by its own client; models and tokenizers are made on the spot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import language_models as models
import preloaded
from serving import get, post, value
from waiting import eventually

pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.timeout(400)

KINDS = {"llama": "llama", "gpt-2": "gpt2"}
PROMPT = "once upon a time"
MESSAGES = [{"role": "user", "content": "two and two"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("snapshots")
    for seed, (name, kind) in enumerate(KINDS.items()):
        models.snapshot(made / name, kind, seed)
    models.encoder_snapshot(made / "bert", pooling={"pooling_mode": "mean"})
    (made / "no-model").mkdir()
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [preloaded.python(), "-m", "torchrelay", "serve", "--models", str(folder)]
    command += ["--port", "0", "--arena-bytes", "400000", "--workers", "1", "--threads", "1"]
    command += ["--slice-s", "0.01", "--start-timeout-s", "300"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "no-model")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("device: cpu, arena of")
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., str]:
    """What transformers itself says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def of(name: str, prompt: str, count: int, *, is_chat: bool = False) -> str:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder / name)
        module: Any = AutoModelForCausalLM.from_pretrained(folder / name)
        if is_chat:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
        else:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        module.generation_config.eos_token_id = None
        with torch.inference_mode():
            made = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    return of


def greedy(count: int = 30, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": count, "extra_body": {"ignore_eos": True}, **more}


def test_models_are_listed_with_their_states(client: Any) -> None:
    assert [one.id for one in client.models.list()] == ["bert", "gpt-2", "llama"]
    assert client.models.retrieve("gpt-2").state == "cold"
    client.completions.create(model="llama", prompt=PROMPT, max_tokens=1)
    found = client.models.retrieve("llama")
    assert (found.id, found.object, found.state) == ("llama", "model", "resident")
    assert found.max_model_len == 2048


@pytest.mark.parametrize("name", KINDS)
def test_completions_are_those_of_transformers(
    client: Any, reference: Callable[..., str], name: str
) -> None:
    expected = reference(name, PROMPT, 30)
    made = client.completions.create(model=name, prompt=PROMPT, **greedy())
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == (expected, "length")
    assert (made.object, made.model) == ("text_completion", name)
    assert made.usage.completion_tokens == 30 and made.usage.recomputed_tokens == 0
    assert made.usage.total_tokens == made.usage.prompt_tokens + 30
    stream = client.completions.create(
        model=name,
        prompt=PROMPT,
        stream=True,
        stream_options={"include_usage": True},
        **greedy(),
    )
    *chunks, last = stream
    assert "".join(one.choices[0].text for one in chunks) == expected
    assert [one.choices[0].finish_reason for one in chunks if one.choices[0].finish_reason] == [
        "length"
    ]
    assert last.choices == [] and last.usage == made.usage
    options = {"include_usage": True, "continuous_usage_stats": True}  # the latter is vLLM's
    stream = client.completions.create(
        model=name, prompt=PROMPT, stream=True, stream_options=options, **greedy(5)
    )
    assert [one.usage.completion_tokens for one in stream][-2:] == [5, 5]


@pytest.mark.parametrize("name", KINDS)
def test_conversations_are_those_of_transformers(
    client: Any, reference: Callable[..., str], name: str
) -> None:
    expected = reference(name, MESSAGES[0]["content"], 30, is_chat=True)
    made = client.chat.completions.create(model=name, messages=MESSAGES, **greedy())
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert (made.object, choice.finish_reason) == ("chat.completion", "length")
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    chunks = list(
        client.chat.completions.create(model=name, messages=parts, stream=True, **greedy())
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {one.object for one in chunks} == {"chat.completion.chunk"}


def test_models_that_take_turns_say_the_same(client: Any, reference: Callable[..., str]) -> None:
    expected = {name: reference(name, PROMPT, 80) for name in KINDS}
    found: dict[str, str] = {}

    def call(name: str) -> None:
        chunks = client.completions.create(model=name, prompt=PROMPT, stream=True, **greedy(80))
        found[name] = "".join(one.choices[0].text for one in chunks)

    threads = [threading.Thread(target=call, args=[name]) for name in KINDS]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == expected


def test_a_text_ends_before_a_stop_string(client: Any, reference: Callable[..., str]) -> None:
    whole = reference("llama", PROMPT, 30)
    stop = whole[8:11]
    asked = {"model": "llama", "prompt": PROMPT, "stop": ["not there", stop], **greedy()}
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    made = client.completions.create(**asked, logprobs=0)
    assert made.usage.completion_tokens == len(made.choices[0].logprobs.tokens)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(one.choices[0].text for one in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_texts(client: Any) -> None:
    asked = {"model": "llama", "prompt": PROMPT, "max_tokens": 20, "n": 3, "seed": 7, "top_p": 0.9}
    first, again = (client.completions.create(**asked) for _ in range(2))
    texts = [one.text for one in first.choices]
    assert texts == [one.text for one in again.choices] and len(set(texts)) == 3
    assert [one.index for one in first.choices] == [0, 1, 2]
    least = client.completions.create(**{**asked, "temperature": 1e-300, "seed": 2**63 - 1})
    (text,) = {one.text for one in least.choices}
    assert (
        text
        == client.completions.create(model="llama", prompt=PROMPT, **greedy(20)).choices[0].text
    )
    unseeded = {**asked, "prompt": [PROMPT, PROMPT], "n": 1, "seed": None}
    assert len({one.text for one in client.completions.create(**unseeded).choices}) == 2
    other = client.completions.create(**{**asked, "seed": 8})
    assert [one.text for one in other.choices] != texts


def test_several_prompts_have_texts_each(client: Any) -> None:
    alone = [
        client.completions.create(model="llama", prompt=one, **greedy(5)).choices[0].text
        for one in ("once", "two")
    ]
    made = client.completions.create(model="llama", prompt=["once", "two"], **greedy(5))
    assert [one.text for one in made.choices] == alone
    ids = client.completions.create(model="llama", prompt=[[5, 6, 7], [8]], **greedy(5))
    assert ids.usage.prompt_tokens == 4 and len(ids.choices) == 2
    long = client.completions.create(
        model="llama", prompt=[5] * 2046, extra_body={"ignore_eos": True, "min_tokens": 2}
    )
    assert long.usage.completion_tokens == 2  # as many as fit


def test_log_probabilities_are_those_of_the_tokens(client: Any) -> None:
    (choice,) = client.completions.create(
        model="llama", prompt=PROMPT, logprobs=2, **greedy(6)
    ).choices
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 6
    assert [max(one.values()) for one in found.top_logprobs] == found.token_logprobs
    (chat,) = client.chat.completions.create(
        model="llama", messages=MESSAGES, logprobs=True, top_logprobs=2, **greedy(6)
    ).choices
    assert all(one.top_logprobs[0].logprob == one.logprob for one in chat.logprobs.content)
    chunks = client.chat.completions.create(
        model="llama", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True, **greedy(6)
    )
    streamed = [
        token
        for one in chunks
        if one.choices[0].logprobs
        for token in one.choices[0].logprobs.content
    ]
    assert streamed == chat.logprobs.content


TEXTS = ["once upon a time", "two", "a cat and a cat and a cat"]


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Any:
    """What transformers itself makes of the texts, one by one, and how many tokens they have."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "bert")
    module: Any = AutoModel.from_pretrained(folder / "bert")
    ids = [tokenizer(one, return_tensors="pt").input_ids for one in TEXTS]
    with torch.inference_mode():
        found = torch.cat([module(input_ids=one).last_hidden_state.mean(1) for one in ids])
    return torch.nn.functional.normalize(found, dim=-1), sum(one.numel() for one in ids)


def test_embeddings_are_those_of_transformers(client: Any, vectors: Any) -> None:
    expected, count = vectors
    for form in ({}, {"encoding_format": "float"}):  # the client asks for base64, and decodes it
        made = client.embeddings.create(model="bert", input=TEXTS, **form)
        assert [one.index for one in made.data] == [0, 1, 2]
        found = torch.tensor([one.embedding for one in made.data])
        torch.testing.assert_close(found, expected)
        assert made.usage.prompt_tokens == made.usage.total_tokens == count
    assert client.models.retrieve("bert").max_model_len == 40
    ids = client.embeddings.create(model="bert", input=[[5, 6], [7]], dimensions=32)
    assert [len(one.embedding) for one in ids.data] == [32, 32] and ids.usage.total_tokens == 3
    many = client.embeddings.create(model="bert", input=[TEXTS[i % 3] for i in range(70)])
    found = torch.tensor([one.embedding for one in many.data])
    torch.testing.assert_close(found, expected[[i % 3 for i in range(70)]])


def test_the_node_client_gets_what_the_python_client_gets(client: Any, url: str) -> None:
    node, folder = shutil.which("node"), os.environ.get("OPENAI_NODE_FOLDER", "")
    if node is None or not (Path(folder) / "node_modules" / "openai").is_dir():
        pytest.skip("needs node, and OPENAI_NODE_FOLDER: npm install --prefix FOLDER openai")
    script = Path(__file__).with_name("openai_client.mjs")
    written = subprocess.check_output([node, script, url], timeout=300)
    found = json.loads(written)
    asked: Any = {"model": "llama", "temperature": 0, "max_tokens": 12}
    chat = client.chat.completions.create(messages=MESSAGES, **asked)
    assert found["chat"] == found["streamed"] == chat.choices[0].message.content
    assert found["usage"]["total_tokens"] == chat.usage.total_tokens
    completion = client.completions.create(prompt=PROMPT, **asked)
    assert found["completion"] == completion.choices[0].text
    made = client.embeddings.create(model="bert", input=["two", "a cat"])
    expected = torch.tensor([one.embedding for one in made.data])
    torch.testing.assert_close(torch.tensor(found["vectors"]), expected)
    assert found["names"] == ["bert", "gpt-2", "llama"]
    assert found["error"] == ["NotFoundError", 404, "model_not_found"]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "asked", "status", "text"),
    [
        (CHAT, {"model": "nothing"}, 404, "there is no model 'nothing'"),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools are not supported"),
        (CHAT, {"messages": [{"role": "tool", "content": "4"}]}, 400, "tool calls are not"),
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, 400, "images, sound and files"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "has no content"),
        (CHAT, {"messages": "hello"}, 400, "messages: Expected `array`"),
        (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format is not"),
        (CHAT, {"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
        (CHAT, {"no_such": 1}, 400, "'no_such' is not supported: leave it out"),
        (CHAT, {"top_logprobs": 21}, 400, "logprobs=21: it must be from 0 to 20"),
        (TEXT, {"max_tokens": 3000}, 400, "a maximum context length of 2048 tokens"),
        (TEXT, {"max_tokens": -1}, 400, "max_tokens=-1: it must be at least 1"),
        (TEXT, {"max_tokens": 0}, 400, "max_tokens=0: it must be at least 1"),
        (TEXT, {"temperature": -1}, 400, "temperature=-1"),
        (TEXT, {"priority": 1001}, 400, "priority=1001: it must be an integer from -1000"),
        (TEXT, {"repetition_penalty": 1.1}, 400, "repetition_penalty is not supported"),
        (TEXT, {"min_tokens": 5, "stop": "x", "ignore_eos": True}, 400, "min_tokens is not supp"),
        (TEXT, {"stream_options": {}}, 400, "stream_options without stream is not"),
        (TEXT, {"prompt": [{}]}, 400, "prompt must be a text"),
        (TEXT, {"prompt": []}, 400, "prompt must be a text"),
        (TEXT, {"prompt": [1, "x"]}, 400, "prompt must be a text"),
        (TEXT, {"prompt": [999]}, 400, "the token 999"),
        (TEXT, {"n": 0}, 400, "n: Expected `int` >= 1"),
        (TEXT, {"best_of": 3}, 400, "best_of is not supported"),
        (TEXT, {"stop": [""]}, 400, "none of them empty"),
        (CHAT, {"model": "bert"}, 400, "model 'bert' does not generate"),
        (EMBED, {"model": "nothing"}, 404, "there is no model 'nothing'"),
        (EMBED, {"model": "llama"}, 400, "model 'llama' is no encoder"),
        (EMBED, {"input": []}, 400, "input must be a text"),
        (EMBED, {"input": [1.5]}, 400, "input must be a text"),
        (EMBED, {"input": "two " * 40}, 400, "a maximum context length of 40"),
        (EMBED, {"input": ["two", ""]}, 400, "input 1 has 0 tokens"),
        (EMBED, {"input": [200]}, 400, "input 0 has the token 200; model"),
        (EMBED, {"dimensions": 8}, 400, "vectors of 32, which are not cut"),
        (EMBED, {"encoding_format": "int8"}, 400, "encoding_format: Invalid enum value"),
        ("/v1/nothing", {}, 404, "the server has no path"),
    ],
)
def test_wrong_requests_get_errors_of_the_form_that_clients_read(
    url: str, path: str, asked: dict[str, Any], status: int, text: str
) -> None:
    known: dict[str, Any] = {
        CHAT: {"messages": MESSAGES},
        EMBED: {"model": "bert", "input": PROMPT},
    }
    body: dict[str, Any] = {"model": "llama", **known.get(path, {"prompt": PROMPT})}
    found, answer = post(url, path, json.dumps({**body, **asked}).encode())
    assert found == status and text in answer["error"]["message"], answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    codes = {"there is no model": "model_not_found", "context length": "context_length_exceeded"}
    expected = next((codes[one] for one in codes if one in text), None)
    assert answer["error"]["code"] == expected


def test_clients_raise_their_own_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'nothing'"):
        client.completions.create(model="nothing", prompt=PROMPT)
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(openai.BadRequestError, match="tools are not supported"):
        client.chat.completions.create(model="llama", messages=MESSAGES, tools=tools)


def test_a_client_that_disconnects_frees_its_place(url: str) -> None:
    address = "127.0.0.1", urlsplit(url).port or 0
    asked = {"model": "llama", "prompt": PROMPT, "stream": True, "ignore_eos": True}
    body = json.dumps({**asked, "max_tokens": 2000, "n": 16}).encode()  # for many seconds
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address, timeout=100) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while received.count(b"data: ") < 40:
            received += connection.recv(1 << 16)
        assert b"text/event-stream" in received
        assert json.loads(get(url, "/status.json")[1])["sequences"]
        assert value(url, "torchrelay_sequences") and value(url, "torchrelay_stash_bytes")
    eventually(lambda: not json.loads(get(url, "/status.json")[1])["sequences"])
    assert 0 < value(url, "torchrelay_tokens_total") < 32_000
