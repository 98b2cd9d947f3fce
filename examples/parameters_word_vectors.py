"""Word vectors (skip-gram with negative sampling) of the standard library's documentation strings::

    python examples/parameters_word_vectors.py
    torchrun --standalone --nproc-per-node 2 examples/parameters_word_vectors.py --node-per-process

Source: Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality" (NIPS 2013). Word ``w`` has two vectors in one table: row ``w`` as a centre, row
``words + w`` as a context. Words are as unevenly frequent as in any text, so most keys belong on
one node at a time and a few on all: the manager moves the former and copies the latter.
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from torchrelay.parameters import Embedding, IntentLoader, KeyInit, Table, optim

WINDOW, NEGATIVES, BATCH_SIZE, RAREST = 5, 5, 1024, 5
SUBSAMPLE = 1e-3
# Every 20th text is kept for the test: which of ten words stood near another?
HELD_OUT, QUESTIONS, CHOICES = 20, 5000, 10
SHOWN = ("file", "string", "list", "thread", "raise", "date")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def documentation() -> Iterator[list[str]]:
    """The words of each documentation string of the standard library, in lower case."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old sources have invalid escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                yield re.findall(r"[a-z]{2,}", text.lower())


class Corpus:
    """Word numbers of all texts in a row, with each word's text and count."""

    def __init__(self) -> None:
        texts = list(documentation())
        counts = Counter(word for text in texts for word in text)
        self.words = [word for word, count in counts.most_common() if count >= RAREST]
        number = {word: index for index, word in enumerate(self.words)}
        pairs = [
            (number[word], at) for at, text in enumerate(texts) for word in text if word in number
        ]
        self.tokens, self.text = torch.tensor(pairs).T.contiguous()
        self.counts = torch.tensor([counts[word] for word in self.words]).double()


def neighbours(tokens: Tensor, text: Tensor) -> Tensor:
    """Words of one text at most ``WINDOW`` apart, both ways round: ``(2, n)``."""
    pairs = []
    for distance in range(1, WINDOW + 1):
        same = (text[:-distance] == text[distance:]).nonzero().squeeze(1)
        pairs.append(torch.stack([tokens[same], tokens[same + distance]]))
    both = torch.cat(pairs, dim=1)
    return torch.cat([both, both.flip(0)], dim=1)


class Pairs:
    """This worker's share of an epoch: centres and contexts ``(b,)`` each, and negatives ``(b *
    NEGATIVES,)``.
    """

    def __init__(self, corpus: Corpus, table: Table) -> None:
        self.corpus, self.table, self.epoch = corpus, table, 0
        self.noise = corpus.counts.pow(0.75)
        share = corpus.counts / corpus.counts.sum()
        self.keep = (SUBSAMPLE / share).sqrt().clamp(max=1.0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1000 * self.epoch + self.table.worker_index)
        self.epoch += 1
        kept = (
            torch.rand(len(self.corpus.tokens), generator=generator) < self.keep[self.corpus.tokens]
        )
        kept &= self.corpus.text % HELD_OUT != 0
        both = neighbours(self.corpus.tokens[kept], self.corpus.text[kept])
        # Neighbouring workers take neighbouring stretches of the text, so each mostly has words of
        # its own.
        low, high = (
            both.shape[1] * (self.table.worker_index + i) // self.table.workers for i in (0, 1)
        )
        mine = both[:, torch.randperm(high - low, generator=generator) + low]
        for centres, contexts in zip(*(row.split(BATCH_SIZE) for row in mine), strict=True):
            wrong = torch.multinomial(
                self.noise, len(centres) * NEGATIVES, True, generator=generator
            )
            yield centres, contexts, wrong


def loss_of(rows: Tensor, size: int) -> Tensor:
    """Negative log-likelihood of the pairs against their negatives; a sum, as each word has a rate
    of its own.
    """
    centres, contexts, wrong = torch.split(rows, [size, size, NEGATIVES * size])
    right = (centres * contexts).sum(1)
    others = torch.einsum("bd,bnd->bn", centres, wrong.view(size, NEGATIVES, -1))
    return -(functional.logsigmoid(right).sum() + functional.logsigmoid(-others).sum())


@torch.no_grad()
def evaluate(corpus: Corpus, table: Table) -> tuple[float, float]:
    """How often the model, and how often the most frequent word, is right about which of ten words
    stood nearby.

    The nine others are drawn as often as they occur, so that frequency alone tells nothing.
    """
    generator = torch.Generator().manual_seed(0)
    held = corpus.text % HELD_OUT == 0
    pairs = neighbours(corpus.tokens[held], corpus.text[held])
    centres, right = pairs[:, torch.randperm(pairs.shape[1], generator=generator)[:QUESTIONS]]
    others = torch.multinomial(corpus.counts, len(right) * (CHOICES - 1), True, generator=generator)
    choices = torch.cat([right.unsqueeze(1), others.view(len(right), -1)], dim=1)
    scores = torch.einsum(
        "bd,bnd->bn", table.pull(centres), table.pull(len(corpus.words) + choices)
    )
    # An equal score is no right answer.
    accuracies = [
        (s[:, 0] > s[:, 1:].amax(1)).float().mean() for s in (scores, corpus.counts[choices])
    ]
    return float(accuracies[0]), float(accuracies[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--node-per-process", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    corpus = Corpus()
    words = len(corpus.words)

    def keys_of(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        centres, contexts, wrong = batch
        return torch.cat([centres, words + contexts, words + wrong])

    with Table.create(
        2 * words,
        options.dim,
        optimizer=optim.adagrad(0.1, initial_accumulator_value=0.1),
        apply_gradients="backward",  # asynchronous: no worker waits for another's batch
        init=KeyInit("uniform", -0.5 / options.dim, 0.5 / options.dim, seed=1),
        node_of_rank=(lambda rank: rank) if options.node_per_process else None,
    ) as table:
        if table.worker_index == 0:
            print(f"{words} words, {len(corpus.tokens)} tokens")
        embedding = Embedding(2 * words, options.dim, table=table)
        pairs = Pairs(corpus, table)
        for epoch in range(1, options.epochs + 1):
            started_s, before, total, seen = time.perf_counter(), table.metrics(), 0.0, 0
            for batch in IntentLoader(pairs, keys_of, table=table):
                loss = loss_of(embedding(keys_of(batch)), len(batch[0]))
                loss.backward()  # type: ignore[no-untyped-call]
                total, seen = total + float(loss.detach()), seen + len(batch[0])
            if table.worker_index == 0:
                seconds = time.perf_counter() - started_s
                print(
                    f"epoch {epoch}: loss {total / seen:.3f}, {seconds:.1f} s, "
                    f"{table.metrics() - before}",
                    flush=True,
                )
        table.sync()
        if table.worker_index == 0:
            accuracy, baseline = evaluate(corpus, table)
            print(
                f"test: of {CHOICES} words, picks the one that stood nearby in {accuracy:.1%} of "
                "texts not trained on; "
                f"the most frequent is it in {baseline:.1%}"
            )
            vectors = functional.normalize(table.pull(torch.arange(words)))
            for word in SHOWN:
                nearest = (vectors @ vectors[corpus.words.index(word)]).topk(7).indices[1:]
                print(f"{word}: {', '.join(corpus.words[index] for index in nearest)}")
        table.sync()


if __name__ == "__main__":
    main()
